//! What to do at a RabbitMQ that refuses: its errors are English, and no other code reads them for advice. Pure; a worker
//! calls it when it reports the state of a connection.

use crate::down::DownReason;

/// The detail of a broken connection in words for the health view, and the command that ends the refusal.
pub fn of_refusal(reason: DownReason, detail: &str, exchange: &str) -> (String, Option<String>) {
    let same = |remedy| (detail.to_owned(), remedy);
    let vhost = between(detail, "vhost '", "' refused")
        .or_else(|| between(detail, "vhost ", " not found").map(|name| name.trim_matches('\'')));
    let login = detail
        .split_once("refused for user '")
        .and_then(|(_, rest)| rest.split_once('\'').map(|(user, _)| user));
    let exchange = escaped(exchange);
    match (reason, vhost, login) {
        (DownReason::PermissionDenied, Some(vhost), Some(user)) => same(Some(format!(
            "on the broker, extend the patterns of the user (rabbitmqctl list_user_permissions {user}; an empty one is ^$): \
             rabbitmqctl set_permissions -p {vhost} {user} 'CONFIGURE|^{exchange}$' 'WRITE|^{exchange}$' 'READ' with the old \
             ones for the words in capitals"
        ))),
        (DownReason::PermissionDenied, ..) if detail.contains("internal exchange") => same(Some(
            "name another exchange: clients do not publish to an internal one".to_owned(),
        )),
        (DownReason::VhostRefused, Some(vhost), Some(user)) => same(Some(format!(
            "on the broker: rabbitmqctl set_permissions -p '{vhost}' '{user}' '^{exchange}$' '^{exchange}$' '^$'"
        ))),
        (DownReason::VhostRefused, Some(vhost), None) => same(Some(format!(
            "correct the path of the URL, or on the broker: rabbitmqctl add_vhost '{vhost}'"
        ))),
        (DownReason::ConnectionLimit, ..) => same(raised_limit(detail, vhost, login)),
        (DownReason::ExchangeMismatch, ..) => {
            let which = match between(detail, "inequivalent arg '", "'") {
                Some(property) => format!("its property \"{property}\" differs"),
                None => "it has other properties".to_owned(),
            };
            (format!("{which}: {detail}"), None)
        }
        _ => same(None),
    }
}

fn raised_limit(detail: &str, vhost: Option<&str>, login: Option<&str>) -> Option<String> {
    let limit: u64 = between(detail, "connection limit (", ")")?.parse().ok()?;
    let more = limit.saturating_add(10);
    let raised = match (login, vhost) {
        (Some(user), _) if detail.contains("user connection limit") => {
            format!("the limit of the user: rabbitmqctl set_user_limits '{user}' '{{\"max-connections\": {more}}}'")
        }
        (_, Some(vhost)) => format!(
            "the limit of the virtual host, and repeat its other limits (rabbitmqctl list_vhost_limits -p '{vhost}'): \
             rabbitmqctl set_vhost_limits -p '{vhost}' '{{\"max-connections\": {more}}}'"
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
                r"rabbitmqctl set_permissions -p 'new' 'u' '^events\.v1$' '^events\.v1$' '^$'",
            ),
            (
                DownReason::VhostRefused,
                "NOT_ALLOWED - vhost new not found",
                "add_vhost 'new'",
            ),
            (
                DownReason::VhostRefused,
                "NOT_ALLOWED - vhost 'new' not found",
                "add_vhost 'new'",
            ),
            (
                DownReason::ConnectionLimit,
                "NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached",
                r#"rabbitmqctl set_vhost_limits -p '/' '{"max-connections": 11}'"#,
            ),
            (
                DownReason::ConnectionLimit,
                "NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached",
                r#"rabbitmqctl set_user_limits 'u' '{"max-connections": 11}'"#,
            ),
        ] {
            assert!(
                remedy(reason, detail).contains(command),
                "{detail}: {}",
                remedy(reason, detail)
            );
        }
        assert_eq!(remedy(DownReason::ConnectionLimit, "connection limit of the node"), "");
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
}
