//! The words of what is wrong with the connection to a destination, whatever its kind; a kind adds its own, and words the
//! same code better. `outbox_internal.worded()` calls this in a session.

use crate::down::NO_ANSWER;
use crate::kind::Kind;
use outbox_core::envelope::address_of;
use outbox_core::event::Event;
use outbox_core::finding::{Rendered, ValueLookup, Words, render, words};
use outbox_core::findings::CHECKS;
use outbox_core::partition::Partition;
use outbox_core::template::{Template, Values};
use outbox_core::text::Text;
use std::borrow::Cow;

pub static WORDS: &[Words] = &[
    // Part of the remedy of a message. The values that begin with e_ describe its event.
    words("unroutable", "", "let the {peer} take it"),
    words("connecting", "connecting to the {peer}", "wait a few seconds"),
    words(
        "unreachable",
        "the {peer} cannot be reached: {detail}",
        "start the {peer}, or correct host and port: `setting {url=?:alter}`",
    ),
    words(
        "timeout",
        "the {peer} does not answer: {detail}",
        "check the network and the load of the {peer}",
    ),
    words(
        NO_ANSWER,
        "the {peer} does not answer: {detail}",
        "check the network and the load of the {peer}",
    ),
    words(
        "process_limit",
        "not tried, because a limit on this side is reached: {detail}",
        "raise the limits of the processes of the server (LimitNOFILE and TasksMax of its unit of systemd, or ulimit -n and \
         -u) and restart it; a worker outside has its own",
    ),
    words(
        "tls_failed",
        "TLS with the {peer} failed: {detail}",
        "let the {peer} present a certificate that is valid for the host in [{o_url:?}the option url of server \
         {destination:I}|outbox.url], or correct the URL: `setting {url=?:alter}`",
    ),
    words(
        "tls_handshake",
        "TLS with the {peer} failed: {detail}",
        "see the log of the {peer}: its certificate needs an RSA, P-256, P-384 or Ed25519 key; or it wants a client \
         certificate: [{o_url:?}{role:?}{m_tls_cert:?}`owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET tls_cert :'tls_cert', SET tls_key :'tls_key')`\
         |{o_url:?}{role:?}`owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS (ADD tls_cert :'tls_cert', ADD \
         tls_key :'tls_key')`\
         |{o_url:?}`owner CREATE USER MAPPING FOR {worker_role:I} SERVER {destination:I} OPTIONS (tls_cert :'tls_cert', \
         tls_key :'tls_key')`\
         |`setting {tls_cert_file=/etc/postgresql/outbox.pem:alter}; \
         {tls_key_file=/etc/postgresql/outbox.key:alter}`]",
    ),
    words(
        "tls_client_certificate",
        "TLS with the {peer} failed: {detail}",
        "[{o_url:?}{role:?}{m_tls_cert:?}give its user mapping a client certificate and its key, as PEM texts: `owner ALTER \
         USER MAPPING FOR {role} SERVER {destination:I} OPTIONS (SET tls_cert :'tls_cert', SET tls_key :'tls_key')`\
         |{o_url:?}{role:?}give its user mapping a client certificate and its key, as PEM texts: `owner ALTER USER MAPPING \
         FOR {role} SERVER {destination:I} OPTIONS (ADD tls_cert :'tls_cert', ADD tls_key :'tls_key')`\
         |{o_url:?}give its user mapping a client certificate and its key, as PEM texts: `owner CREATE USER MAPPING FOR \
         {worker_role:I} SERVER {destination:I} OPTIONS (tls_cert :'tls_cert', tls_key :'tls_key')`\
         |name a client certificate that the {peer} accepts, and its key: \
         `setting {tls_cert_file=/etc/postgresql/outbox.pem:alter}; \
         {tls_key_file=/etc/postgresql/outbox.key:alter}`]",
    ),
    words(
        "tls_ca",
        "TLS with the {peer} failed: {detail}",
        "[{o_tls_ca:?}give the destination the CA of that certificate, as a PEM text: `setting {tls_ca=?:set}`\
         |name the CA of that certificate: `setting {tls_ca_file=/etc/postgresql/outbox-ca.pem:alter}`]",
    ),
    words(
        "address_refused",
        "the address is not public: {detail}",
        "if that is meant, allow it: `setting {http_allow:alter}`",
    ),
    words(
        "unconfirmed",
        "the {peer} is connected and does not confirm: {detail}",
        "check the load of the {peer}; the worker sends unconfirmed messages again by itself",
    ),
    words(
        "memory",
        "messages wait for memory of the worker: {detail}",
        "see which destinations hold it, and pause those that do not answer: `admin select destination, in_flight from \
         outbox_destination_status order by in_flight desc`; or raise outbox.workers",
    ),
    words(
        "blocked",
        "the {peer} takes no messages: {detail}",
        "see the log of the {peer}; delivery resumes by itself",
    ),
    words(
        "password_file",
        "{detail}",
        "make the file readable for the server's user only, with the password as its first line, or name another one: \
         `setting {password_file=?:alter}`",
    ),
    words(
        "certificate_file",
        "{detail}",
        "let the file be in PEM, and a key readable for the server's user only, or name another one: \
         `setting {*setting=?:alter}`",
    ),
    words(
        "mapping_unreadable",
        "{detail}",
        "`owner GRANT USAGE ON FOREIGN SERVER {destination:I} TO {role}`",
    ),
    words(
        "mapping_missing",
        "{detail}",
        "`owner CREATE USER MAPPING FOR {role} SERVER {destination:I} OPTIONS (signing_secret :'signing_secret')`",
    ),
    words(
        "mapping_empty",
        "{detail}",
        "fill it, because a dump of a role that may not read secrets leaves it empty: `owner ALTER USER MAPPING FOR {role} \
         SERVER {destination:I} OPTIONS (ADD user :'user', ADD password :'password')`, or drop it if it needs none: \
         `owner DROP USER MAPPING FOR {role} SERVER {destination:I}`",
    ),
    words(
        "unconfigured",
        "{detail}",
        "[{server:?}{option:?}correct it: `setting {*option=?:set}`; see docs/destinations.md|{server:?}correct the options of \
         server {destination:I}: see docs/destinations.md|name the {peer}: `setting {url=?:alter}`]",
    ),
];

/// The words of a connection that failed for any other reason.
static OTHER: Words = words(
    "",
    "the connection to the {peer} failed: {detail}",
    "see the log of the {peer}, and whether it is the one that [{o_url:?}the option url of server {destination:I}|outbox.url] \
     names",
);

/// The problem and the remedy of a code. The value `wrapper` names the kind of the destination.
pub fn worded(code: &str, value: ValueLookup, identifier: &dyn Fn(&str) -> String) -> [Rendered; 2] {
    let wrapper = value("wrapper");
    let kind = wrapper.map_or(Some(Kind::of_settings()), |wrapper| Kind::of_wrapper(&wrapper));
    let own = kind.map_or(&[][..], |kind| kind.words);
    let found = [own, WORDS, CHECKS]
        .into_iter()
        .flatten()
        .find(|words| words.code == code);
    let words = found.unwrap_or(&OTHER);
    let of_kind = |name: &str| match name {
        "peer" => Some(kind.map_or("peer", |kind| kind.peer).into()),
        "wrapper" => kind.map(|kind| kind.wrapper.into()),
        "place" => option_of(kind?.place?, value).filter(|place| !place.is_empty()),
        "address" => address(kind?, value).map(|address| address.as_str().to_owned().into()),
        name => value(name),
    };
    [words.problem, words.remedy].map(|template| render(template, &of_kind, identifier))
}

/// An option of the destination, or the setting that counts without it.
fn option_of<'a>(name: &str, value: ValueLookup<'a>) -> Option<Cow<'a, str>> {
    value(&format!("o_{name}")).or_else(|| value(&format!("s_{name}")))
}

/// The address of the message that the values with `e_` describe.
fn address(kind: &Kind, value: ValueLookup) -> Option<Text> {
    let template = Template::parse(&option_of(kind.address?, value)?).ok()?;
    let text = |name: &str| value(name).map(Cow::into_owned);
    let event = Event {
        kind: text("e_type")?,
        aggregate_type: text("e_aggregate_type"),
        aggregate_id: text("e_aggregate_id"),
        operation: text("e_operation"),
        headers: text("e_headers"),
        ..Event::default()
    };
    let (key, destination) = (value("key"), value("destination")?);
    let values = Values {
        event: &event,
        key: key.as_deref(),
        partition: Partition::parse_label(&value("label")?).ok()?,
        destination: &destination,
        headers: &[],
    };
    address_of(&kind.form, &[&kind.form], &template, values).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::down::DownReason;
    use crate::kinds::KINDS;
    use outbox_core::finding::check_table;

    #[test]
    fn each_code_has_its_words() {
        for table in KINDS.iter().map(|kind| kind.words).chain([WORDS]) {
            assert_eq!(check_table(table), Ok(()));
        }
        let own = KINDS.iter().flat_map(|kind| kind.reasons);
        for reason in own.chain(&DownReason::ALL) {
            let mut tables = KINDS.iter().map(|kind| kind.words).chain([WORDS]);
            let is_plain = matches!(*reason, DownReason::PROTOCOL | DownReason::CLOSED);
            let has_words = tables.any(|table| table.iter().any(|words| words.code == reason.name()));
            assert!(has_words || is_plain, "{}", reason.name());
        }
    }

    #[test]
    fn a_setting_is_changed_where_the_destination_has_it() {
        let worded = |code: &str, given: &[(&str, &str)]| {
            let find = |name: &str| {
                let found = given.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).into())
            };
            let [_, remedy] = worded(code, &find, &|name| name.to_owned());
            remedy.commands[0].command.clone()
        };
        let server = [("destination", "audit"), ("wrapper", "outbox_amqp"), ("server", "")];
        let with = |more: &[(&'static str, &'static str)]| [&server[..], more].concat();
        assert_eq!(
            worded("unreachable", &with(&[("o_url", "amqp://a")])),
            "ALTER SERVER audit OPTIONS (SET url :'url')"
        );
        // The settings have the URL.
        let of_system = "ALTER SYSTEM SET outbox.url = :'url'; SELECT pg_reload_conf()";
        assert_eq!(worded("unreachable", &server), of_system);
        let of_database = [("database", "shop"), ("database_settings", "workers,url")];
        assert_eq!(
            worded("unreachable", &with(&of_database)),
            "ALTER DATABASE shop SET outbox.url = :'url'"
        );
        let declared = "OPTIONS (ADD exchange_type 'topic')";
        assert_eq!(
            worded("exchange_missing", &server),
            format!("ALTER SERVER audit {declared}")
        );
        // Others that take the type from the settings must not get another one.
        let default = [
            ("destination", "default"),
            ("others", "2"),
            ("others_exchange_type", "1"),
        ];
        assert_eq!(
            worded("exchange_missing", &default),
            "CREATE SERVER default FOREIGN DATA WRAPPER outbox_amqp OPTIONS (exchange_type 'topic')"
        );
        let alone = [
            ("destination", "default"),
            ("others", "1"),
            ("others_exchange_type", "1"),
        ];
        assert!(worded("exchange_missing", &alone).starts_with("ALTER SYSTEM SET outbox.exchange_type = 'topic';"));
    }
}
