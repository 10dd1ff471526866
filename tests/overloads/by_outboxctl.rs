//! Runs outboxctl as a superuser: its commands, its screen, its page, its worker.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use support::{process, program};

use super::*;

/// Overloads of functions of Postgres itself that fit better: found if the schema were in search_path.
const BESIDE_CORE: &str = r#"
set role mallory;
create function public.to_jsonb(record) returns jsonb language plpgsql as
  $$ begin raise log 'an overload ran as %', current_user; return '{}'; end $$;
create function public.format(text, text) returns text language plpgsql as
  $$ begin raise log 'an overload ran as %', current_user; return ''; end $$;
create function public.greatest_of(numeric, integer) returns numeric language plpgsql as
  $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
create operator public.* (function = public.greatest_of, leftarg = numeric, rightarg = integer);
"#;

fn command(cluster: &Cluster, args: &[&str]) -> Command {
    let mut command = Command::new(program::outboxctl());
    command.args(args).arg("-d").arg(cluster.conn_string(DB));
    command.env_remove("OUTBOX_URL").stdin(Stdio::null());
    command
}

/// A program that runs until it is killed at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        process::kill(&mut self.0);
    }
}

/// Functions that take only the arguments a user passes, and so would fit better a call that omits the others.
const OF_FEW_ARGUMENTS: &str = "
create function public.outbox_retry_where(error_like text, max_rows integer, dry_run boolean) returns bigint
  language plpgsql as $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
create function public.outbox_discard_where(key text, max_rows integer, dry_run boolean) returns bigint
  language plpgsql as $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
create function public.outbox_replay(key text, max_rows integer, dry_run boolean) returns bigint
  language plpgsql as $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
";

pub fn commands(cluster: &Cluster) {
    cluster.exec(DB, BESIDE_CORE);
    cluster.exec(DB, OF_FEW_ARGUMENTS);
    for args in [
        &["status"][..],
        &["check"],
        &["list"],
        &["list", "--status", "published"],
        &["show", "1"],
        &["pause"],
        &["resume"],
        &["retry", "999999"],
        &["retry", "--error-like", "none", "--yes"],
        &["discard", "999999", "--yes"],
        &["discard", "--key", "none", "--yes"],
        &["replay", "--key", "none", "--yes"],
        &["relay", "--limit", "5"],
        &["version"],
    ] {
        let ran = command(cluster, args).output().expect("run outboxctl");
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert!(matches!(ran.status.code(), Some(0 | 1)), "{args:?}: {stderr}");
        assert_unharmed(cluster);
    }
    first_line(cluster, &["top", "--json"]);
    let (_page, printed) = first_line(cluster, &["serve", "--listen", "127.0.0.1:0", "--json"]);
    let address = printed.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.unwrap_or_else(|| panic!("{printed}"));
    for path in [
        "/",
        "/messages",
        "/messages?tab=published",
        "/message/1",
        "/destinations",
        "/workers",
        "/metrics",
    ] {
        let mut stream = TcpStream::connect(address).expect("connect to the page");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        )
        .expect("ask");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(!answer.starts_with("HTTP/1.1 5"), "{path}: {answer}");
    }
    assert_unharmed(cluster);
}

/// Starts outboxctl, and waits for the first line of its output; returns both.
fn first_line(cluster: &Cluster, args: &[&str]) -> (Running, String) {
    let mut command = command(cluster, args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
    let output = child.stdout.take().expect("piped");
    let mut running = Running(child);
    let mut printed = String::new();
    BufReader::new(output).read_line(&mut printed).expect("its first line");
    assert!(
        !printed.is_empty(),
        "{args:?} ended: {:?}",
        running.0.stderr.take().map(std::io::read_to_string)
    );
    assert_unharmed(cluster);
    (running, printed)
}

/// Delivers with a worker outside the server only.
pub fn work(cluster: &Cluster, deliver: &dyn Fn(&Cluster)) {
    cluster.set_conf("outbox.workers", "0");
    wait_unharmed(
        cluster,
        "the workers in the server to end",
        "select not exists (select from outbox_workers where worker_id like 'server-%')
            or not exists (select from pg_stat_activity where backend_type = 'outbox worker')",
    );
    let mut command = command(cluster, &["work", "--name", "courier"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let worker = Running(process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl"));
    wait_unharmed(
        cluster,
        "the worker outside",
        "select exists (select from outbox_worker_status where alive and worker_id like 'work-courier-%')",
    );
    deliver(cluster);
    let mut worker = worker;
    process::signal(worker.0.id(), libc::SIGTERM);
    assert!(process::reap(&mut worker.0, LONG).is_some(), "it ends when asked to");
    assert_unharmed(cluster);
    cluster.set_conf("outbox.workers", "1");
}
