//! What to do at a RabbitMQ that refuses: its errors are English, and no other code reads them for advice. Pure; a
//! worker calls it when it reports the state of a connection.

use crate::down::DownReason;
use outbox_core::remedy::shell_word;

/// The detail of a broken connection in words for the health view, and the command that ends the refusal. `None` =
/// there is none, or a name in it could not stand in a command.
pub fn of_refusal(reason: DownReason, detail: &str, exchange: &str) -> (String, Option<String>) {
    let same = |remedy| (detail.to_owned(), remedy);
    let (vhost, user) = refused(detail).map_or((None, None), |(vhost, user)| (vhost, Some(user)));
    let vhost = vhost.or_else(|| between(detail, "vhost ", " not found").map(|name| name.trim_matches('\'')));
    let exchange = format!("^{}$", escaped(exchange));
    // A control character is a key to the terminal that it is pasted into, and `--node=…` an option of rabbitmqctl.
    let is_unfit = |name: &str| name.starts_with('-') || name.contains(char::is_control);
    let has_unfit = [vhost, user, Some(&exchange)].into_iter().flatten().any(is_unfit);
    let [vhost, user] = [vhost, user].map(|name| name.map(shell_word));
    match (reason, vhost, user) {
        (DownReason::ExchangeMismatch, ..) => {
            let which = match between(detail, "inequivalent arg '", "'") {
                Some(property) => format!("its property \"{property}\" differs"),
                None => "it has other properties".to_owned(),
            };
            (format!("{which}: {detail}"), None)
        }
        (DownReason::ExchangeTypeUnknown, ..) => {
            let plugin = between(detail, "unknown exchange type '", "'").and_then(plugin_of);
            same(
                plugin.map(|name| {
                    format!("on the broker, enable the plugin of the type: rabbitmq-plugins enable {name}")
                }),
            )
        }
        _ if has_unfit => same(None),
        (DownReason::PermissionDenied, Some(vhost), Some(user)) => {
            let [configure, write] = ["CONFIGURE", "WRITE"].map(|old| shell_word(&format!("{old}|{exchange}")));
            same(Some(format!(
                "on the broker, extend the patterns of the user (rabbitmqctl list_user_permissions {user}; an empty one is ^$): \
                 rabbitmqctl set_permissions -p {vhost} {user} {configure} {write} 'READ' with the old ones for the words in \
                 capitals"
            )))
        }
        (DownReason::PermissionDenied, ..) if detail.contains("internal exchange") => same(Some(
            "name another exchange: clients do not publish to an internal one".to_owned(),
        )),
        (DownReason::VhostRefused, Some(vhost), Some(user)) => {
            let exchange = shell_word(&exchange);
            same(Some(format!(
                "on the broker: rabbitmqctl set_permissions -p {vhost} {user} {exchange} {exchange} '^$'"
            )))
        }
        (DownReason::VhostRefused, Some(vhost), None) => same(Some(format!(
            "correct the path of the URL, or on the broker: rabbitmqctl add_vhost {vhost}"
        ))),
        (DownReason::ConnectionLimit, vhost, user) => same(raised_limit(detail, vhost, user)),
        _ => same(None),
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

/// What raises the limit; the names are words of a shell.
fn raised_limit(detail: &str, vhost: Option<String>, user: Option<String>) -> Option<String> {
    let limit: u64 = between(detail, "connection limit (", ")")?.parse().ok()?;
    let more = limit.saturating_add(10);
    let raised = match (user, vhost) {
        (Some(user), _) if detail.contains("user connection limit") => {
            format!("the limit of the user: rabbitmqctl set_user_limits {user} '{{\"max-connections\": {more}}}'")
        }
        (_, Some(vhost)) => format!(
            "the limit of the virtual host, and repeat its other limits (rabbitmqctl list_vhost_limits -p {vhost}): \
             rabbitmqctl set_vhost_limits -p {vhost} '{{\"max-connections\": {more}}}'"
        ),
        _ => return None,
    };
    Some(format!(
        "close some connections (rabbitmqctl list_connections user vhost), or raise {raised}"
    ))
}

/// What ends the alarm for which the broker blocks publishers.
pub fn of_alarm(detail: &str) -> Option<&'static str> {
    if detail.contains("disk") {
        Some("free disk on the broker, or lower its limit: rabbitmqctl set_disk_free_limit 50MB")
    } else if detail.contains("memory") {
        Some("let its consumers take messages, or raise its limit: rabbitmqctl set_vm_memory_high_watermark 0.6")
    } else {
        None
    }
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
    use std::process::Command;

    #[test]
    fn the_words_of_rabbitmq_give_the_command() {
        let remedy = |reason, detail| of_refusal(reason, detail, "events.v1").1.unwrap_or_default();
        for (reason, detail, command) in [
            (
                DownReason::PermissionDenied,
                "ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'u'",
                r"rabbitmqctl set_permissions -p / u 'CONFIGURE|^events\.v1$' 'WRITE|^events\.v1$' 'READ' with",
            ),
            (
                DownReason::PermissionDenied,
                "ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'",
                "name another exchange",
            ),
            (
                DownReason::VhostRefused,
                "NOT_ALLOWED - access to vhost 'new' refused for user 'u'",
                r"rabbitmqctl set_permissions -p new u '^events\.v1$' '^events\.v1$' '^$'",
            ),
            (
                DownReason::VhostRefused,
                "NOT_ALLOWED - vhost new not found",
                "add_vhost new",
            ),
            (
                DownReason::VhostRefused,
                "NOT_ALLOWED - vhost 'new' not found",
                "add_vhost new",
            ),
            (
                DownReason::ConnectionLimit,
                "NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached",
                r#"rabbitmqctl set_vhost_limits -p / '{"max-connections": 11}'"#,
            ),
            (
                DownReason::ConnectionLimit,
                "NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached",
                r#"rabbitmqctl set_user_limits u '{"max-connections": 11}'"#,
            ),
        ] {
            assert!(
                remedy(reason, detail).contains(command),
                "{detail}: {}",
                remedy(reason, detail)
            );
        }
        assert_eq!(remedy(DownReason::ConnectionLimit, "connection limit of the node"), "");
        let known = remedy(
            DownReason::ExchangeTypeUnknown,
            "COMMAND_INVALID - unknown exchange type 'x-random'",
        );
        assert!(
            known.ends_with("rabbitmq-plugins enable rabbitmq_random_exchange"),
            "{known}"
        );
        let unknown = "COMMAND_INVALID - unknown exchange type 'x-unheard-of; id'";
        assert_eq!(remedy(DownReason::ExchangeTypeUnknown, unknown), "");
        let (detail, remedy) = of_refusal(
            DownReason::ExchangeMismatch,
            "inequivalent arg 'type' for exchange",
            "x",
        );
        assert_eq!(
            detail,
            "its property \"type\" differs: inequivalent arg 'type' for exchange"
        );
        assert_eq!(remedy, None);
        assert!(of_alarm("low on memory").is_some() && of_alarm("low on disk").is_some() && of_alarm("").is_none());
    }
    /// What the command of a refusal is for a shell: its words. `None` = the remedy has no command.
    fn words(reason: DownReason, detail: &str, exchange: &str) -> Option<String> {
        let (_, remedy) = of_refusal(reason, detail, exchange);
        let (_, command) = remedy.as_deref()?.rsplit_once("rabbitmqctl ")?;
        let script = format!(
            "for word in {}; do printf '[%s]' \"$word\"; done",
            command.replace(" with the old", "")
        );
        let output = Command::new("sh").args(["-c", &script]).output().expect("sh");
        Some(String::from_utf8(output.stdout).expect("UTF-8"))
    }

    #[test]
    fn a_name_is_one_word_of_the_command_and_no_shell_reads_it() {
        let access = |vhost, user| {
            format!("ACCESS_REFUSED - access to exchange 'x' in vhost '{vhost}' refused for user '{user}'")
        };
        for name in ["u;touch evil|sh", "it's", "my shop", "$(id)", "a\\", "'"] {
            let permission = words(DownReason::PermissionDenied, &access(name, name), name).expect("a command");
            let begin = format!("[set_permissions][-p][{name}][{name}][CONFIGURE|^");
            assert!(permission.starts_with(&begin), "{permission}");
            let pattern = escaped(name);
            assert!(
                permission.contains(&format!("^{pattern}$][WRITE|^{pattern}$][READ]")),
                "{permission}"
            );
            assert_eq!(
                words(DownReason::VhostRefused, &access(name, name), name),
                Some(format!(
                    "[set_permissions][-p][{name}][{name}][^{pattern}$][^{pattern}$][^$]"
                ))
            );
            let limit = format!("{}: connection limit (1) is reached", access(name, name));
            let limits = words(DownReason::ConnectionLimit, &limit, "x").expect("a command");
            assert!(
                limits.starts_with(&format!("[set_vhost_limits][-p][{name}][{{")),
                "{limits}"
            );
            let limit = format!("connection refused for user '{name}': user connection limit (1) is reached");
            let limits = words(DownReason::ConnectionLimit, &limit, "x").expect("a command");
            assert!(limits.starts_with(&format!("[set_user_limits][{name}][{{")), "{limits}");
        }
        let missing = words(DownReason::VhostRefused, "NOT_ALLOWED - vhost my shop not found", "x");
        assert_eq!(missing.as_deref(), Some("[add_vhost][my shop]"));
    }

    #[test]
    fn an_exchange_cannot_name_another_user_for_the_command() {
        let exchange = "x' in vhost 'v' refused for user 'evil";
        let detail = format!("access to exchange '{exchange}' in vhost '/' refused for user 'u' by backend b: no");
        let command = words(DownReason::PermissionDenied, &detail, exchange).expect("a command");
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
            for reason in [DownReason::PermissionDenied, DownReason::VhostRefused] {
                assert_eq!(words(reason, &detail, exchange), None, "{detail:?}");
            }
        }
        assert_eq!(words(DownReason::VhostRefused, "vhost -v not found", "x"), None);
    }
}
