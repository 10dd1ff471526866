//! Checks that receivers accept the publisher's signatures when they verify them with the published library of Standard
//! Webhooks. The library is Python's `standardwebhooks`, installed into a private environment below target/.

mod support;

use outbox_transport::{HttpConfig, Outcome, Secret};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::Desk;
use support::receiver::{Receiver, message, status};

const LIBRARY: &str = "standardwebhooks==1.1.0";
const CURRENT: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const FOREIGN: &str = "whsec_bm90IHRoZSBzZWNyZXQgb2YgYW55Ym9keQ==";

/// Reads secret, id, time, signatures and body, each from its line.
const VERIFY: &str = "
import sys
from standardwebhooks.webhooks import Webhook
lines = sys.stdin.buffer.read().split(b'\\n', 4)
secret, id, time, signature = (line.decode() for line in lines[:4])
headers = {'webhook-id': id, 'webhook-timestamp': time, 'webhook-signature': signature}
Webhook(secret).verify(lines[4], headers, json_parse=False)
";

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

/// A Python with the library. Created once; a marker file shows that the installation is complete.
fn python() -> PathBuf {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standardwebhooks");
    let python = environment.join("bin/python");
    let complete = environment.join(LIBRARY);
    if !complete.exists() {
        run(Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&environment));
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-deps", LIBRARY]));
        std::fs::write(&complete, "").unwrap();
    }
    python
}

/// Whether the library accepts the signature of this body with this secret.
fn verifies(python: &Path, secret: &str, id: &str, time: &str, signature: &str, body: &[u8]) -> bool {
    let mut child = Command::new(python)
        .args(["-c", VERIFY])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = format!("{secret}\n{id}\n{time}\n{signature}\n").into_bytes();
    input.extend(body);
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let is_rejected = text.contains("WebhookVerificationError");
    assert_ne!(
        output.status.success(),
        is_rejected,
        "the library itself failed: {text}"
    );
    output.status.success()
}

#[test]
fn the_published_library_verifies_the_publishers_signatures() {
    let python = python();
    let receiver = Receiver::start(|_| status(200));
    let mut desk = Desk::start(HttpConfig {
        signing_secrets: vec![Secret::new(CURRENT), Secret::new(OLD)],
        ..receiver.config()
    });
    let bodies = ["{\"name\": \"Zoë\", \"line\": \"a\\nb\"}", "", "plain\ntext."];
    for (handle, body) in (0..).zip(bodies) {
        let mut message = message(handle);
        message.body = body.into();
        desk.publish(vec![message]);
        desk.until_answered(handle as usize + 1);
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
    }
    desk.stop();
    for request in receiver.requests() {
        let (time, signatures) = (request.header("webhook-timestamp"), request.header("webhook-signature"));
        let check = |secret, body: &[u8]| verifies(&python, secret, request.id(), time, signatures, body);
        assert!(check(CURRENT, &request.body), "{request:?}");
        assert!(
            check(OLD, &request.body),
            "a receiver that knows only the old secret: {request:?}"
        );
        assert!(!check(FOREIGN, &request.body));
        assert!(!check(CURRENT, &[&request.body[..], b" "].concat()));
    }
}
