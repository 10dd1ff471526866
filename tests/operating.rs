//! Tests of running the server. Each module covers one subject: health, stops, CREATE and DROP EXTENSION, settings
//! changed at run time, status, drain, dumps. Delivery itself is tested in delivery.rs, failures on the way in
//! faults.rs.

mod drain;
mod dump;
mod extension;
mod health;
mod hung;
mod running;
mod session;
mod status;
mod stop;

use support::Cluster;
use support::DB;

/// The name of every check of outbox_health that fails; asserts that each of these states the problem and the fix.
pub fn problems(cluster: &Cluster) -> Vec<String> {
    let sql = r#"select "check", ok, problem, remedy from outbox_health"#;
    let rows = cluster.connect(DB).query(sql, &[]).expect("outbox_health");
    assert!(rows.len() >= 8, "{} checks", rows.len());
    let mut failing = Vec::new();
    for row in rows {
        let (check, ok): (String, bool) = (row.get(0), row.get(1));
        let (problem, remedy): (Option<String>, Option<String>) = (row.get(2), row.get(3));
        let words = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains(' '));
        assert_eq!(words(&problem), !ok, "{check}: {problem:?}");
        assert_eq!(words(&remedy), !ok, "{check}: {remedy:?}");
        if !ok {
            failing.push(check);
        }
    }
    failing
}

pub fn has_worker(db: &str) -> String {
    format!(
        "select exists (select from pg_stat_activity where backend_type = 'outbox worker' and datname = '{db}'
                        and usename is not null)"
    )
}
