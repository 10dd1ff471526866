//! The words of what is wrong with a receiver.

use crate::down::DownReason;
use outbox_core::finding::{Words, words};

/// The URL has moved, does not exist, or does not accept messages.
pub(super) const ENDPOINT_REFUSED: DownReason = DownReason::new("endpoint_refused", "the URL does not accept messages");
pub(super) const THROTTLED: DownReason = DownReason::new("throttled", "the destination asks for fewer requests");
pub(super) const UNAVAILABLE: DownReason =
    DownReason::new("unavailable", "the destination reports that it is not available");

pub static REASONS: &[DownReason] = &[ENDPOINT_REFUSED, THROTTLED, UNAVAILABLE];

pub static WORDS: &[Words] = &[
    words(
        "auth_refused",
        "the receiver refuses the credentials: {detail}",
        "[{role:?}{m_password:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET password :'password')`\
         |{role:?}{m_bearer_token:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} \
         OPTIONS (SET bearer_token :'bearer_token')`\
         |{role:?}{m_headers:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET headers :'headers')`\
         |{role:?}{m_hidden:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS \
         (SET bearer_token :'bearer_token')`\
         |{role:?}correct the credentials: `owner ALTER USER MAPPING FOR {role} SERVER {destination:I} OPTIONS (ADD \
         bearer_token :'bearer_token')`\
         |name the credentials: `owner CREATE USER MAPPING FOR {worker_role:I} SERVER {destination:I} OPTIONS (bearer_token \
         :'bearer_token')`]",
    ),
    words(
        "no_answer",
        "the receiver does not answer: {detail}",
        "check the network and the load of the receiver, or give it more time: `setting {timeout=1min:set}`",
    ),
    words(
        "endpoint_refused",
        "the URL does not accept messages: {detail}",
        "let the receiver take messages at this URL, or correct it: `setting {url=?:alter}`",
    ),
    words(
        "throttled",
        "the receiver asks for fewer requests: {detail}",
        "nothing: delivery resumes when the receiver allows it",
    ),
    words(
        "unavailable",
        "the receiver reports that it is not available: {detail}",
        "nothing here: delivery resumes when the receiver is available; see its log",
    ),
    words(
        "lag",
        "the oldest message that can be delivered, seq {seq}, has waited for {age}; its destination takes {per_s} messages a \
         second, [{o_concurrency}|8] requests at a time",
        "if the receiver can take more requests at a time: [{concurrency:?}`setting {concurrency:set}`\
         |`setting {concurrency=16:set}`]; else see the other checks; if all are ok, the workers or the receiver are too slow: \
         `setting {workers:alter}`",
    ),
    words(
        "tls_ca",
        "TLS with the receiver failed: {detail}",
        "give the destination the CA of that certificate, as a PEM text: `setting {tls_ca=?:set}`",
    ),
    words(
        "mapping_empty",
        "{detail}",
        "fill it, because a dump of a role that may not read secrets leaves it empty: `owner ALTER USER MAPPING FOR {role} \
         SERVER {destination:I} OPTIONS (ADD signing_secret :'signing_secret')`, or drop it if it needs none: `owner DROP \
         USER MAPPING FOR {role} SERVER {destination:I}`",
    ),
];
