//! Runs docs/migrations.md: the superuser's part as a superuser, and each migration as the role of the migrations.
//! Alembic and ActiveRecord run theirs; of the others the SQL runs, in one transaction, as their tools do it. Each
//! migration is followed by a write of the application, and by the way back if the page has one.

use crate::readme::Page;
use std::path::Path;
use std::process::Command;
use support::program::example_packages;
use support::workdir::ServerDir;
use support::{Cluster, skip_without};

const SHOP: &str = "shop";

/// What one role does in the database.
fn exec(cluster: &Cluster, role: &str, sql: &str) {
    let login = cluster
        .conn_string(SHOP)
        .replace("user=postgres", &format!("user={role}"));
    let mut client = postgres::Client::connect(&login, postgres::NoTls).expect(role);
    client
        .batch_execute(sql)
        .unwrap_or_else(|error| panic!("{role}: {error:?}\n{sql}"));
}

/// A migration: it runs as `migrator`, a row of the application makes an event, and the way back leaves no table.
fn migrates(cluster: &Cluster, table: &str, row: &str, up: impl FnOnce(), down: impl FnOnce()) {
    up();
    exec(cluster, "app", &format!("insert into {table} {row}"));
    let events = format!("select count(*) from outbox_messages where key like '{table}:%'");
    assert_eq!(cluster.query_one::<i64>(SHOP, &events), 1, "{table}");
    down();
    let is_there = format!("select to_regclass('{table}') is not null");
    assert!(!cluster.query_one::<bool>(SHOP, &is_there), "{table} is left");
}

/// The SQL that one method of a class passes to `function`.
fn passed_to(function: &str, class: &str, method: &str) -> String {
    let (_, body) = class.split_once(&format!(" {method}(")).expect(method);
    let (body, _) = body.split_once("\n    }\n").expect("the end of a method");
    let begins = format!("{function}(");
    let calls = body.split(&begins).skip(1).map(|call| {
        let (quote, sql) = call.split_at(1);
        sql.split_once(&format!("{quote});")).expect("the end of a call").0
    });
    calls.collect::<Vec<_>>().join(";\n")
}

#[test]
fn each_migration_of_the_page_runs_as_an_ordinary_role() {
    let page = Page::open("docs/migrations.md");
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec("postgres", "create role app login; create role migrator login");
    cluster.exec("postgres", "create database shop");
    cluster.exec(SHOP, &page.one("Once, as a superuser", "sql"));
    let migrate = |sql: &str| exec(&cluster, "migrator", sql);

    migrate(&page.one("Flyway", "sql"));
    exec(&cluster, "app", "insert into orders (customer, total) values (7, 99.9)");
    let changes = page.blocks("Changes of a captured table", "sql");
    for change in &changes {
        migrate(change);
    }
    exec(&cluster, "app", "insert into orders (customer, amount) values (8, 10)");
    let orders =
        "select array_agg(payload ->> 'customer' order by seq) from outbox_messages where type = 'OrdersCreated'
                  and payload ? 'amount' = (payload ->> 'customer' = '8')";
    assert_eq!(cluster.query_one::<Vec<String>>(SHOP, orders), ["7", "8"]);
    let all = "select count(*) from outbox_messages where key like 'orders:%'";
    assert_eq!(
        cluster.query_one::<i64>(SHOP, all),
        2,
        "the change of all rows makes no event"
    );

    let changeset = page.one("Liquibase", "sql");
    let back = changeset.lines().filter_map(|line| line.strip_prefix("--rollback "));
    let back = back.collect::<Vec<_>>().join("\n");
    let (up, down) = (|| migrate(&changeset), || migrate(&back));
    migrates(&cluster, "payments", "(amount) values (5)", up, down);

    for (tool, language, function, [up, down], table, row) in [
        (
            "EF Core",
            "csharp",
            "migrationBuilder.Sql",
            ["Up", "Down"],
            "refunds",
            "(amount) values (5)",
        ),
        (
            "Doctrine",
            "php",
            "addSql",
            ["up", "down"],
            "credits",
            "(amount) values (5)",
        ),
        (
            "Laravel",
            "php",
            "DB::statement",
            ["up", "down"],
            "parcels",
            "(weight) values (5)",
        ),
    ] {
        let class = page.one(tool, language);
        let run = |method| migrate(&passed_to(function, &class, method));
        migrates(&cluster, table, row, || run(up), || run(down));
    }

    let directory = ServerDir::create("migrations");
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let file = |name: &str, text: String| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("write a migration");
        path
    };
    let run = |command: &mut Command| {
        let url = format!("postgresql://migrator@127.0.0.1:{}/{SHOP}", cluster.port());
        let output = command.env("DATABASE_URL", url).output().expect("run a migration");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let shipments = file("shipments.py", page.one("Alembic", "python"));
    let alembic = |action| {
        let mut command = Command::new(example_packages().join("python/bin/python3"));
        command
            .arg(beside.join("run_alembic.py"))
            .arg(&shipments)
            .arg(directory.path());
        run(command.arg(action));
    };
    let (up, down) = (|| alembic("upgrade"), || alembic("downgrade"));
    migrates(&cluster, "shipments", "(carrier) values ('post')", up, down);

    if !skip_without(
        "Rails of docs/migrations.md",
        &["ruby", "/usr/lib/ruby/vendor_ruby/pg.rb"],
    ) {
        let invoices = file("invoices.rb", page.one("Rails", "ruby"));
        let rails = |direction| {
            let mut command = Command::new("ruby");
            command.arg(beside.join("run_rails.rb")).arg(&invoices);
            run(command.args(["CaptureInvoices", direction]));
        };
        migrates(
            &cluster,
            "invoices",
            "(customer) values (7)",
            || rails("up"),
            || rails("down"),
        );
    }

    cluster.exec(SHOP, "truncate outbox"); // messages that wait keep the source
    for sql in page.blocks("An event table and a destination", "sql") {
        migrate(&sql);
    }
    exec(
        &cluster,
        "app",
        "insert into events (kind, data) values ('OrderPaid', '{}')",
    );
    let enqueued = "select count(*) from outbox o join events e on e.id = o.seq";
    assert_eq!(cluster.query_one::<i64>(SHOP, enqueued), 1);
    directory.finish();
}
