//! What is wrong with a RabbitMQ, and the words for it. Its errors are English, and no other code reads them: this finds in
//! them the names that a command needs. Pure.

use crate::down::{DownReason, Fault};
use outbox_core::finding::{Finding, Words, words};
use std::collections::BTreeSet;

pub(super) const VHOST_REFUSED: DownReason = DownReason::new(
    "vhost_refused",
    "the virtual host does not exist, or the user may not access it",
);
pub(super) const EXCHANGE_MISSING: DownReason = DownReason::new("exchange_missing", "the exchange does not exist");
pub(super) const EXCHANGE_MISMATCH: DownReason =
    DownReason::new("exchange_mismatch", "the exchange exists with other properties");
/// For example because a plugin is not enabled.
pub(super) const EXCHANGE_TYPE_UNKNOWN: DownReason = DownReason::new(
    "exchange_type_unknown",
    "the broker does not know the type of the exchange",
);

pub static REASONS: &[DownReason] = &[
    VHOST_REFUSED,
    EXCHANGE_MISSING,
    EXCHANGE_MISMATCH,
    EXCHANGE_TYPE_UNKNOWN,
];

pub static WORDS: &[Words] = &[
    words(
        "auth_refused",
        "the broker refuses the user or password: {detail}",
        "[{role:?}{m_password:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET password :'password')`\
         |{role:?}{m_hidden:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET password :'password')`\
         |{role:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS (ADD password \
         :'password')`\
         |{o_url:?}name the credentials: `owner CREATE USER MAPPING FOR {worker_role:I} SERVER {destination:I} OPTIONS (user \
         :'user', password :'password')`\
         |correct the user in outbox.url, or the password in {s_password_file}; a worker reads the file again by itself\
         |write the password of the user in outbox.url into a file with mode 600 of the server's user: \
         `setting {password_file=/etc/postgresql/outbox.password:alter}`]",
    ),
    words(
        "guest_refused",
        "the broker refuses the user or password: {detail}",
        "RabbitMQ lets the user guest log in from its own host only; make another one, which asks for its password: `peer \
         rabbitmqctl add_user outbox`, and `peer rabbitmqctl set_permissions -p {vhost:S} outbox {pattern:S} {pattern:S} '^$'`; \
         then name it in the URL: `setting {url=?:alter}`, with its password in a user mapping, or in the file that \
         outbox.password_file names",
    ),
    words(
        "permission_denied",
        "the user of the broker lacks a permission: {detail}",
        "grant the user configure and write permission on the exchange",
    ),
    words(
        "exchange_forbidden",
        "the user of the broker lacks a permission: {detail}",
        "on the broker, let it configure and write the exchanges of its destinations, beside what it may now: `peer (old() {{ \
         rabbitmqctl -q --no-table-headers list_permissions -p {vhost:S} | awk -F'\\t' -v user={user:S} -v n=\"$1\" \
         '$1 == user {{p = $n}} END {{print p ? p : \"^$\"}}'; }}; rabbitmqctl set_permissions -p {vhost:S} {user:S} \
         \"$(old 2)|\"{pattern:S} \"$(old 3)|\"{pattern:S} \"$(old 4)\")`",
    ),
    words(
        "exchange_internal",
        "the exchange is internal: {detail}",
        "name another exchange, because clients do not publish to an internal one: `setting {exchange=?:set}`",
    ),
    words(
        "vhost_refused",
        "the broker refuses the virtual host: {detail}",
        "check the path of [{o_url:?}the option url of server {destination:I}|outbox.url] and the user's permissions",
    ),
    words(
        "vhost_access",
        "the broker refuses the virtual host: {detail}",
        "on the broker: `peer rabbitmqctl set_permissions -p {vhost:S} {user:S} {pattern:S} {pattern:S} '^$'`",
    ),
    words(
        "vhost_missing",
        "the broker refuses the virtual host: {detail}",
        "correct the path of the URL, or on the broker: `peer rabbitmqctl add_vhost {vhost:S}`",
    ),
    words(
        "vhost_down",
        "the broker refuses the virtual host: {detail}",
        "on the broker: `peer rabbitmqctl restart_vhost -p {vhost:S}`",
    ),
    words(
        "connection_limit",
        "the broker takes no more connections: {detail}",
        "close some connections (rabbitmqctl list_connections user vhost), or raise connection_max of the broker",
    ),
    words(
        "connection_limit_of_user",
        "the broker takes no more connections: {detail}",
        "close some connections (rabbitmqctl list_connections user vhost), or raise the limit of the user: `peer rabbitmqctl \
         set_user_limits {user:S} '{{\"max-connections\": {more}}}'`",
    ),
    words(
        "connection_limit_of_vhost",
        "the broker takes no more connections: {detail}",
        "close some connections (rabbitmqctl list_connections user vhost), or raise the limit of the virtual host, and repeat \
         its other limits (rabbitmqctl list_vhost_limits -p {vhost:S}): `peer rabbitmqctl set_vhost_limits -p {vhost:S} \
         '{{\"max-connections\": {more}}}'`",
    ),
    words(
        "exchange_missing",
        "the exchange does not exist: {detail}",
        "declare the exchange and its bindings, or let the worker declare it: `setting {exchange_type=topic:own}`",
    ),
    words(
        "exchange_mismatch",
        "the exchange exists, and [its property \"{property}\" differs|it has other properties]: {detail}",
        "let the worker only check that the exchange exists: `setting {exchange_type=:own}`",
    ),
    words(
        "exchange_type_unknown",
        "the broker does not know the type of the exchange: {detail}",
        "enable the plugin of the type on the broker (rabbitmq-plugins list), or let the worker only check that the exchange \
         exists: `setting {exchange_type=:own}`",
    ),
    words(
        "exchange_plugin_disabled",
        "the broker does not know the type of the exchange: {detail}",
        "on the broker, enable the plugin of the type: `peer rabbitmq-plugins enable {plugin}`",
    ),
    words(
        "unroutable",
        "",
        "[bind a queue to exchange \"{place}\" for routing key \"{address}\"|bind a queue for it, as the error says]",
    ),
    words(
        "queue_refused",
        "a queue behind the exchange refuses the messages: {detail}",
        "see which queue is full: `peer rabbitmqctl list_queues name messages policy arguments`; consume its messages or raise \
         its max-length; delivery resumes by itself",
    ),
    words(
        "unconfirmed",
        "the broker is connected and does not confirm: {detail}",
        "see which queue does not answer: `peer rabbitmqctl list_unresponsive_queues`; start the nodes that it needs, or delete \
         it; the worker sends unconfirmed messages again by itself",
    ),
    words(
        "no_answer",
        "the broker does not answer: {detail}",
        "check the network and the load of the broker; if both are well, see which queue does not answer: `peer rabbitmqctl \
         list_unresponsive_queues`",
    ),
    words(
        "disk_alarm",
        "the broker blocks publishers: {detail}",
        "free disk on the broker, or lower its limit: `peer rabbitmqctl set_disk_free_limit 50MB`; delivery resumes by itself",
    ),
    words(
        "memory_alarm",
        "the broker blocks publishers: {detail}",
        "let its consumers take messages, or raise its limit: `peer rabbitmqctl set_vm_memory_high_watermark 0.6`; delivery \
         resumes by itself",
    ),
    words(
        "blocked",
        "the broker blocks publishers: {detail}",
        "see `peer rabbitmq-diagnostics alarms` on the broker; delivery resumes by itself",
    ),
    words(
        "no_url",
        "outbox.url is empty: there is no broker to deliver to",
        "name the broker: `setting {url=amqp://localhost:alter}`",
    ),
];

/// What a refusal of RabbitMQ is about. `exchanges`: all that the user of this connection publishes to. `is_remote_guest`:
/// whether it logs in as guest from another host.
pub fn of_refusal(fault: Fault, exchanges: &BTreeSet<String>, is_remote_guest: bool) -> Finding {
    let Fault { reason, mut finding } = fault;
    let detail = finding.detail.clone();
    let (vhost, user) = refused(&detail).map_or((None, None), |(vhost, user)| (vhost, Some(user)));
    let vhost = vhost.or_else(|| between(&detail, "vhost ", " not found").map(|name| name.trim_matches('\'')));
    let pattern = pattern(exchanges);
    // A control character is a key to the terminal that it is pasted into, and `--node=…` an option of rabbitmqctl.
    let is_unfit = |name: &str| name.starts_with('-') || name.contains(char::is_control);
    let has_unfit = [vhost, user, Some(&pattern)].into_iter().flatten().any(is_unfit);
    let code = match (reason, vhost, user) {
        (EXCHANGE_MISMATCH, ..) => {
            let property = between(&detail, "inequivalent arg '", "'");
            finding
                .args
                .extend(property.map(|property| ("property", property.to_owned())));
            return finding;
        }
        (EXCHANGE_TYPE_UNKNOWN, ..) => {
            let plugin = between(&detail, "unknown exchange type '", "'").and_then(plugin_of);
            finding.code = plugin.map_or(finding.code, |_| "exchange_plugin_disabled");
            finding.args.extend(plugin.map(|plugin| ("plugin", plugin.to_owned())));
            return finding;
        }
        (DownReason::PERMISSION_DENIED, ..) if detail.contains("internal exchange") => "exchange_internal",
        (DownReason::AUTH_REFUSED, ..) if is_remote_guest && !has_unfit => {
            finding.code = "guest_refused";
            return finding.with("vhost", vhost.unwrap_or("/")).with("pattern", pattern);
        }
        _ if has_unfit => return finding,
        (VHOST_REFUSED, Some(_), _) if detail.ends_with(" is down") => "vhost_down",
        (VHOST_REFUSED, Some(_), Some(_)) => "vhost_access",
        (VHOST_REFUSED, Some(_), None) => "vhost_missing",
        (DownReason::CONNECTION_LIMIT, ..) => {
            let limit: Option<u64> = between(&detail, "connection limit (", ")").and_then(|limit| limit.parse().ok());
            let of_user = user.is_some() && detail.contains("user connection limit");
            finding
                .args
                .extend(limit.map(|limit| ("more", limit.saturating_add(10).to_string())));
            match limit {
                Some(_) if of_user => "connection_limit_of_user",
                Some(_) if vhost.is_some() => "connection_limit_of_vhost",
                _ => finding.code,
            }
        }
        (DownReason::PERMISSION_DENIED, Some(_), Some(_)) => "exchange_forbidden",
        _ => return finding,
    };
    finding.code = code;
    let names = [("vhost", vhost), ("user", user), ("pattern", Some(&*pattern))];
    let names = names
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?.to_owned())));
    finding.args.extend(names);
    finding
}

/// The regular expression that matches these exchanges. The default one is `amq.default` in permissions
/// (rabbit_access_control:check_resource_access/4).
fn pattern(exchanges: &BTreeSet<String>) -> String {
    let names = exchanges.iter().map(|name| match name.as_str() {
        "" => escaped("amq.default"),
        name => escaped(name),
    });
    let names: Vec<String> = names.collect();
    match names.as_slice() {
        [one] => format!("^{one}$"),
        several => format!("^({})$", several.join("|")),
    }
}

/// The plugin of RabbitMQ that has this type of exchange.
fn plugin_of(exchange_type: &str) -> Option<&'static str> {
    Some(match exchange_type {
        "x-consistent-hash" => "rabbitmq_consistent_hash_exchange",
        "x-delayed-message" => "rabbitmq_delayed_message_exchange",
        "x-jms-topic" => "rabbitmq_jms_topic_exchange",
        "x-modulus-hash" => "rabbitmq_sharding",
        "x-random" => "rabbitmq_random_exchange",
        "x-recent-history" => "rabbitmq_recent_history_exchange",
        "x-rtopic" => "rabbitmq_rtopic_exchange",
        _ => return None,
    })
}

/// What the alarm is about for which the broker blocks publishers.
pub fn of_alarm(detail: String) -> Finding {
    let code = match () {
        () if detail.contains("disk") => "disk_alarm",
        () if detail.contains("memory") => "memory_alarm",
        () => "blocked",
    };
    Finding::new(code, detail)
}

/// The virtual host and the user of `… in vhost 'v' refused for user 'u'`. Read from the end, because a destination
/// names its exchange, and could name another user in it. After the user may come `: …`, `, backend …` or ` by backend
/// …`.
fn refused(detail: &str) -> Option<(Option<&str>, &str)> {
    let (before, rest) = detail.rsplit_once("refused for user '")?;
    let is_end = |rest: &str| {
        rest.is_empty()
            || [":", ", backend ", " by backend "]
                .iter()
                .any(|end| rest.starts_with(end))
    };
    let (end, _) = rest.match_indices('\'').find(|(at, _)| is_end(&rest[at + 1..]))?;
    let vhost = before
        .strip_suffix("' ")
        .and_then(|before| before.rsplit_once("vhost '"));
    Some((vhost.map(|(_, vhost)| vhost), &rest[..end]))
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once(after).map(|(found, _)| found)
}

/// The name as a regular expression that matches only it.
fn escaped(name: &str) -> String {
    let mut escaped = String::with_capacity(name.len());
    for c in name.chars() {
        if "].*+?^${}()|\\[".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::worded;
    use std::process::Command;

    fn found(reason: DownReason, detail: &str, exchanges: &[&str]) -> Finding {
        let exchanges = exchanges.iter().map(|name| (*name).to_owned()).collect();
        of_refusal(Fault::new(reason, detail), &exchanges, false)
    }

    /// The commands for a refusal.
    fn commands(reason: DownReason, detail: &str, exchanges: &[&str]) -> Vec<String> {
        let finding = found(reason, detail, exchanges);
        let value = |name: &str| {
            let known = finding.args.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| value.into())
        };
        let [_, remedy] = worded(finding.code, &value, &|name| name.to_owned());
        let commands = remedy.commands.into_iter().filter(|command| command.place != "psql");
        commands.map(|command| command.command).collect()
    }

    #[test]
    fn the_words_of_rabbitmq_give_the_command() {
        for (reason, detail, command) in [
            (
                VHOST_REFUSED,
                "NOT_ALLOWED - access to vhost 'new' refused for user 'u'",
                r"rabbitmqctl set_permissions -p new u '^(docs|events\.v1)$' '^(docs|events\.v1)$' '^$'",
            ),
            (
                VHOST_REFUSED,
                "NOT_ALLOWED - vhost new not found",
                "rabbitmqctl add_vhost new",
            ),
            (
                VHOST_REFUSED,
                "NOT_ALLOWED - vhost 'new' not found",
                "rabbitmqctl add_vhost new",
            ),
            (
                VHOST_REFUSED,
                "INTERNAL_ERROR - access to vhost 'new' refused for user 'u': vhost 'new' is down",
                "rabbitmqctl restart_vhost -p new",
            ),
            (
                DownReason::CONNECTION_LIMIT,
                "NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached",
                r#"rabbitmqctl set_vhost_limits -p / '{"max-connections": 11}'"#,
            ),
            (
                DownReason::CONNECTION_LIMIT,
                "NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached",
                r#"rabbitmqctl set_user_limits u '{"max-connections": 11}'"#,
            ),
            (
                EXCHANGE_TYPE_UNKNOWN,
                "COMMAND_INVALID - unknown exchange type 'x-random'",
                "rabbitmq-plugins enable rabbitmq_random_exchange",
            ),
        ] {
            let found = commands(reason, detail, &["events.v1", "docs"]);
            assert_eq!(found.first().map(String::as_str), Some(command), "{detail}");
        }
        for (reason, detail) in [
            (DownReason::CONNECTION_LIMIT, "connection limit of the node"),
            (
                EXCHANGE_TYPE_UNKNOWN,
                "COMMAND_INVALID - unknown exchange type 'x-unheard-of; id'",
            ),
        ] {
            assert_eq!(commands(reason, detail, &["x"]), [""; 0]);
        }
        let internal = "ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'";
        assert_eq!(
            found(DownReason::PERMISSION_DENIED, internal, &["x"]).code,
            "exchange_internal"
        );
        let differs = found(EXCHANGE_MISMATCH, "inequivalent arg 'type' for exchange", &["x"]);
        assert_eq!(differs.args, [("property", "type".to_owned())]);
        for (detail, code) in [
            ("low on memory", "memory_alarm"),
            ("low on disk", "disk_alarm"),
            ("", "blocked"),
        ] {
            assert_eq!(of_alarm(detail.to_owned()).code, code);
        }
    }

    #[test]
    fn guest_from_another_host_gets_a_user_of_its_own() {
        let fault = Fault::new(DownReason::AUTH_REFUSED, "ACCESS_REFUSED - Login was refused");
        let exchanges = BTreeSet::from([String::new()]);
        assert_eq!(of_refusal(fault.clone(), &exchanges, false).code, "auth_refused");
        let finding = of_refusal(fault, &exchanges, true);
        assert_eq!(finding.code, "guest_refused");
        assert!(
            finding.args.contains(&("pattern", r"^amq\.default$".to_owned())),
            "{finding:?}"
        );
    }

    /// What the commands of a refusal do in a shell: the words of the last call. None = the remedy has no command. The user
    /// has the permissions `old c`, nothing and `r`.
    fn words(reason: DownReason, detail: &str, exchange: &str) -> Option<String> {
        let command = commands(reason, detail, &[exchange]).into_iter().next()?;
        let user = refused(detail).map_or("", |(_, user)| user).replace('\'', r"'\''");
        let script = format!(
            r#"rabbitmqctl() {{
                 case "$*" in
                   *list_permissions*) printf 'other\tx\tx\tx\n%s\told c\t\tr\n' '{user}';;
                   *) for word; do printf '[%s]' "$word"; done;;
                 esac
               }}
               {command}"#
        );
        let output = Command::new("sh").args(["-c", &script]).output().expect("sh");
        assert!(output.stderr.is_empty(), "{output:?}");
        Some(String::from_utf8(output.stdout).expect("UTF-8"))
    }

    #[test]
    fn a_name_is_one_word_of_the_command_and_no_shell_reads_it() {
        let access = |vhost, user| {
            format!("ACCESS_REFUSED - access to exchange 'x' in vhost '{vhost}' refused for user '{user}'")
        };
        for name in ["u;touch evil|sh", "it's", "my shop", "$(id)", "a\\", "'"] {
            let permission = words(DownReason::PERMISSION_DENIED, &access(name, name), name).expect("a command");
            let pattern = escaped(name);
            let user = format!("[-p][{name}][{name}]");
            // awk may read a backslash as an escape: then it finds no user, and gives no more.
            let [old, more] = [["old c", "^$", "r"], ["^$"; 3]].map(|[configure, write, read]| {
                format!("[set_permissions]{user}[{configure}|^{pattern}$][{write}|^{pattern}$][{read}]")
            });
            assert!(
                permission == old || name.contains('\\') && permission == more,
                "{permission}"
            );
            assert_eq!(
                words(VHOST_REFUSED, &access(name, name), name),
                Some(format!("[set_permissions]{user}[^{pattern}$][^{pattern}$][^$]"))
            );
            let limit = format!("{}: connection limit (1) is reached", access(name, name));
            let limits = words(DownReason::CONNECTION_LIMIT, &limit, "x").expect("a command");
            assert!(
                limits.starts_with(&format!("[set_vhost_limits][-p][{name}][{{")),
                "{limits}"
            );
            let limit = format!("connection refused for user '{name}': user connection limit (1) is reached");
            let limits = words(DownReason::CONNECTION_LIMIT, &limit, "x").expect("a command");
            assert!(limits.starts_with(&format!("[set_user_limits][{name}][{{")), "{limits}");
        }
        let missing = words(VHOST_REFUSED, "NOT_ALLOWED - vhost my shop not found", "x");
        assert_eq!(missing.as_deref(), Some("[add_vhost][my shop]"));
    }

    #[test]
    fn an_exchange_cannot_name_another_user_for_the_command() {
        let exchange = "x' in vhost 'v' refused for user 'evil";
        let detail = format!("access to exchange '{exchange}' in vhost '/' refused for user 'u' by backend b: no");
        let command = words(DownReason::PERMISSION_DENIED, &detail, exchange).expect("a command");
        assert!(command.starts_with("[set_permissions][-p][/][u]["), "{command}");
    }

    #[test]
    fn a_name_that_a_command_line_cannot_have_gives_no_command() {
        for (vhost, user, exchange) in [
            ("v", "u\nid\n", "x"),
            ("v\u{1b}[A", "u", "x"),
            ("v", "u", "x\r"),
            ("v", "--node=evil", "x"),
            ("-v", "u", "x"),
        ] {
            let detail = format!("access to vhost '{vhost}' refused for user '{user}'");
            for reason in [DownReason::PERMISSION_DENIED, VHOST_REFUSED] {
                assert_eq!(words(reason, &detail, exchange), None, "{detail:?}");
            }
        }
        assert_eq!(words(VHOST_REFUSED, "vhost -v not found", "x"), None);
    }
}
