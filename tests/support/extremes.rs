//! Every setting that ALTER DATABASE and ALTER ROLE take, with hostile values. The list comes from pg_settings, so that
//! no setting is forgotten.

use postgres::Client;

/// The number of rounds. One round sets all settings at once; after all rounds each setting has had all its values.
pub const ROUNDS: usize = 4;

/// Texts that are valid for one setting. Other settings would refuse them.
const TEXTS: &[(&str, [&str; ROUNDS])] = &[
    ("datestyle", ["German, DMY", "SQL, YMD", "Postgres, MDY", "Redshift"]),
    (
        "timezone",
        ["Pacific/Apia", "America/St_Johns", "Europe/Dublin", "Mars"],
    ),
    ("timezone_abbreviations", ["Australia", "India", "Default", "none"]),
    ("client_encoding", ["LATIN1", "SJIS", "SQL_ASCII", "UTF8"]),
    ("search_path", ["pg_temp", "", "trap", "nowhere, pg_catalog"]),
    ("default_tablespace", ["nowhere", "pg_default", "pg_global", ""]),
    ("temp_tablespaces", ["nowhere", "pg_default", "", "nowhere, elsewhere"]),
    ("default_table_access_method", ["heap", "nowhere", "", "brin"]),
    ("role", ["bystander", "none", "no_such_role", "bystander"]),
    (
        "session_authorization",
        ["bystander", "no_such_role", "bystander", "no_such_role"],
    ),
];

/// Each setting and its value in the given round.
pub fn of_round(client: &mut Client, round: usize) -> Vec<(String, String)> {
    let sql = "select name, vartype, setting, min_val, max_val, enumvals from pg_settings
               where context in ('user', 'superuser') and name not like 'outbox.%' and name <> 'role'
               -- From 18 on, core finds not even its own conversions of encodings with a wrong one.
               and not (name = 'dynamic_library_path' and current_setting('server_version_num')::int >= 180000)
               order by name";
    let rows = client.query(sql, &[]).expect("pg_settings");
    assert!(rows.len() > 150, "{} settings found", rows.len());
    let text = |name: &str| {
        TEXTS
            .iter()
            .find(|(of, _)| of.eq_ignore_ascii_case(name))
            .map(|(_, texts)| texts[round])
    };
    let mut settings: Vec<(String, String)> = (rows.iter())
        .map(|row| {
            let (name, now): (String, String) = (row.get(0), row.get::<_, Option<String>>(2).unwrap_or_default());
            let is_even = round.is_multiple_of(2);
            let value = match row.get::<_, &str>(1) {
                "bool" if is_even => if now == "on" { "off" } else { "on" }.to_owned(),
                "bool" => now,
                "integer" | "real" => row.get(if is_even { 3 } else { 4 }),
                "enum" => {
                    let values: Vec<String> = row.get(5);
                    values[round.min(values.len() - 1)].clone()
                }
                _ => text(&name)
                    .unwrap_or(["", "x", "pg_catalog", "/nowhere"][round])
                    .to_owned(),
            };
            (name, value)
        })
        .collect();
    settings.extend(["role", "session_authorization"].map(|name| {
        let value = text(name).expect("a text").to_owned();
        (name.to_owned(), value)
    }));
    settings
}

/// Sets the settings for a database or role, except values that the server refuses. Returns how many the server
/// accepted.
pub fn set(client: &mut Client, target: &str, settings: &[(String, String)]) -> usize {
    let one = |(name, value): &(String, String)| {
        let value = value.replace('\'', "''");
        format!("alter {target} set {name} to '{value}'")
    };
    let mut transaction = client.transaction().expect("begin");
    let mut accepted = 0;
    for setting in settings {
        let mut savepoint = transaction.transaction().expect("savepoint");
        if savepoint.batch_execute(&one(setting)).is_ok() {
            savepoint.commit().expect("release");
            accepted += 1;
        }
    }
    transaction.commit().expect("commit");
    accepted
}
