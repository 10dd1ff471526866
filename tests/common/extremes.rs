//! Every setting that ALTER DATABASE and ALTER ROLE take, with the values that it should not have: made from what the server
//! says of it, so that none can be forgotten.

use postgres::Client;

/// One round sets all of them at once; in so many rounds each has had its values.
pub const ROUNDS: usize = 4;

/// Texts that mean something to one of the settings, and nothing to the others: those refuse them.
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
    ("role", ["bystander", "none", "nobody", "bystander"]),
    ("session_authorization", ["bystander", "nobody", "bystander", "nobody"]),
];

/// Each setting and its value in this round.
pub fn of_round(client: &mut Client, round: usize) -> Vec<(String, String)> {
    let sql = "select name, vartype, setting, min_val, max_val, enumvals from pg_settings
               where context in ('user', 'superuser') and name not like 'outbox.%' and name <> 'role' order by name";
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

/// Sets them for a database or role, but for values that the server refuses. Returns how many it took.
pub fn set(client: &mut Client, whom: &str, settings: &[(String, String)]) -> usize {
    let one = |(name, value): &(String, String)| {
        let value = value.replace('\'', "''");
        format!("alter {whom} set {name} to '{value}'")
    };
    let mut transaction = client.transaction().expect("begin");
    let mut taken = 0;
    for setting in settings {
        let mut savepoint = transaction.transaction().expect("savepoint");
        if savepoint.batch_execute(&one(setting)).is_ok() {
            savepoint.commit().expect("release");
            taken += 1;
        }
    }
    transaction.commit().expect("commit");
    taken
}
