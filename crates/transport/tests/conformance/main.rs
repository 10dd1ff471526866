//! What a worker relies on with every transport: `exercise` has the rules, and a file for each kind has its peer.

mod amqp;
mod exercise;
mod http;
#[path = "../support/mod.rs"]
mod support;
mod toy;

mod kinds {
    use crate::exercise::exercise;

    exercise!(amqp: crate::amqp::Amqp);
    exercise!(http: crate::http::Http);
    exercise!(toy: crate::toy::Toy);
}
