//! Destinations by AMQP 0-9-1: exchanges of RabbitMQ, with lapin. `connected` has what is the same for each kind with a
//! connection.
//!
//! Runs on the publisher thread. A current-thread runtime drives everything here and lapin's tasks; lapin's own thread
//! makes the socket calls.

mod channel;
mod config;
mod connect;
mod findings;
mod guard;
mod kind;
mod nesting;

mod returns;
mod sendable;
mod url;

pub use config::{AmqpConfig, ExchangeType};
pub(crate) use kind::KIND;
pub use url::{AmqpAddress, parse_url};

use crate::connected::keep_connected;
use crate::intake::Intake;
use crate::transport::{SharedPools, Transport};
use std::io;

impl Transport for AmqpConfig {
    fn check(&self) -> io::Result<()> {
        self.validate()
    }

    fn window(&self) -> usize {
        self.window
    }

    async fn run(self, intake: &mut Intake<'_>, pools: &SharedPools) -> Result<(), String> {
        let terms = self.terms();
        keep_connected(self, terms, intake, pools).await
    }
}
