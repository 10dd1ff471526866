//! The endpoints of a broker and their addresses: which one is connected to next, and the connection that replaces one
//! that has lived for long.
//!
//! Runs on the publisher thread. Lives as long as its destination; `connect` connects to one address.

use super::config::AmqpConfig;
use super::connect::{self, Limit, Link};
use super::guard::SocketHandle;
use crate::down::Fault;
use crate::lookup::Host;
use crate::pool;
use crate::transport::SharedPools;
use std::cell::Cell;
use std::collections::VecDeque;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// The time limit for lapin's thread to notice that its socket is shut.
pub(crate) const CUT_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for each of several endpoints: the next one may answer immediately.
const ENDPOINT_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for closing a connection that was opened only as a probe.
const ASIDE_LIMIT: Duration = Duration::from_secs(1);
/// How often in its life a connection that could not be replaced is tried to be.
const RETRIES: u32 = 10;

/// The endpoints of a broker.
pub(crate) struct Endpoints<'a> {
    /// Its first endpoint is the one to connect to.
    pub(crate) config: AmqpConfig,
    /// The hosts of the endpoints, in their order.
    hosts: VecDeque<Host>,
    pub(crate) pools: &'a SharedPools,
    /// Whether the last connect failed after a long time.
    is_slow: Cell<bool>,
    /// The number of lapin's threads that have outlived their sockets.
    pub(crate) stuck_threads: Cell<u32>,
    /// The endpoints that were tried one after the other without a wait.
    tried: usize,
    /// Why each connect to one of them failed.
    failures: Vec<String>,
}

impl<'a> Endpoints<'a> {
    pub(crate) fn new(mut config: AmqpConfig, pools: &'a SharedPools) -> Self {
        if config.endpoints.len() > 1 {
            config.connect_timeout = config.connect_timeout.min(ENDPOINT_LIMIT);
        }
        let hosts = config.endpoints.iter();
        Self {
            hosts: hosts
                .map(|endpoint| pools.lookups.host(endpoint, &config.allow))
                .collect(),
            config,
            pools,
            is_slow: Cell::default(),
            stuck_threads: Cell::default(),
            tried: 0,
            failures: Vec::new(),
        }
    }

    pub(crate) fn host(&self) -> &Host {
        &self.hosts[0]
    }

    // ---- turns ------------------------------------------------------------------------------------------------------

    /// Goes to the next endpoint. Returns whether each has had its turn.
    pub(crate) fn go_on(&mut self) -> bool {
        self.config.endpoints.rotate_left(1);
        self.hosts.rotate_left(1);
        self.tried += 1;
        let is_over = self.tried >= self.hosts.len();
        if is_over {
            self.begin_turn();
        }
        is_over
    }

    pub(crate) fn begin_turn(&mut self) {
        self.tried = 0;
        self.failures.clear();
    }

    pub(crate) fn connected(&mut self) {
        self.failures.clear();
    }

    /// Records a failed connect. Returns what to report if that was the last endpoint: while others may answer, the
    /// broker does not count as down.
    pub(crate) fn failed(&mut self, fault: &Fault) -> Option<Fault> {
        self.failures.push(fault.detail.clone());
        let is_last = self.tried + 1 >= self.hosts.len();
        is_last.then(|| Fault::new(fault.reason, self.failures.join("; ")))
    }

    // ---- connections ------------------------------------------------------------------------------------------------

    /// Connects to the first address of the endpoint that answers. If this future is dropped, a socket that it has
    /// opened is in `wire`.
    pub(crate) async fn open(&self, wire: &mut Option<SocketHandle>) -> Result<Opened, Fault> {
        let until = Instant::now() + self.config.connect_timeout;
        let addresses = self.host().addresses(self.config.connect_timeout).await?;
        let left = until.saturating_duration_since(Instant::now());
        // Not before the name is resolved: a lookup that hangs needs none of lapin's threads.
        let slot = self.pools.pool.wait_for_slot(self.is_slow.get()).await;
        let opened = self.open_one_of(addresses, left, wire).await;
        self.is_slow.set(opened.is_err() && pool::is_slow(slot.took()));
        opened
    }

    async fn open_one_of(
        &self,
        addresses: Vec<SocketAddr>,
        left: Duration,
        wire: &mut Option<SocketHandle>,
    ) -> Result<Opened, Fault> {
        let mut connect = self.host().connect(addresses, Instant::now() + left);
        while let Some((address, limit)) = connect.next() {
            match connect::connect(&self.config, address, Limit::new(limit), wire).await {
                Err(fault) => connect.failed(address, fault),
                Ok(link) => {
                    if let Some(wire) = wire.take() {
                        self.host().answered(address);
                        return Ok(Opened { link, wire });
                    }
                }
            }
            if let Some(socket) = wire {
                self.count_stuck(socket.cut(CUT_LIMIT).await);
                *wire = None;
            }
        }
        Err(connect.fault())
    }

    /// Counts a thread of lapin that is not gone.
    pub(crate) fn count_stuck(&self, is_gone: bool) {
        self.stuck_threads.set(self.stuck_threads.get() + u32::from(!is_gone));
    }

    /// Whether the broker answers on another connection, which is opened for this and closed again. Tries the other
    /// endpoints and addresses first: the silent one may have lost its network.
    pub(crate) async fn answer_apart_from(&self, silent: SocketAddr) -> bool {
        let hosts = self.hosts.iter().map(|host| host.apart_from(silent));
        let mut others = Self {
            hosts: hosts.collect(),
            ..Self::new(self.config.clone(), self.pools)
        };
        loop {
            let is_last = others.go_on();
            let mut wire = None;
            if let Ok(opened) = others.open(&mut wire).await {
                opened.close(true, ASIDE_LIMIT, ASIDE_LIMIT).await;
                return true;
            }
            if is_last {
                return false;
            }
        }
    }

    /// The connection that replaces one that begins now, once that has lived for long.
    pub(crate) async fn successor(&self) -> Opened {
        let Some(life) = self.host().life(self.config.connection_life) else {
            return pending().await;
        };
        tokio::time::sleep(life).await;
        loop {
            if let Ok(opened) = self.open(&mut None).await {
                return opened;
            }
            tokio::time::sleep(life / RETRIES).await;
        }
    }
}

/// An open connection, and the means to end it in any case.
pub(crate) struct Opened {
    pub(crate) link: Link,
    pub(crate) wire: SocketHandle,
}

impl Opened {
    /// Closes the connection. A polite close is sent after the messages that lapin still buffers. Returns whether
    /// lapin's thread has ended.
    pub(crate) async fn close(mut self, is_polite: bool, close_limit: Duration, cut_limit: Duration) -> bool {
        let status = self.link.connection.status();
        if is_polite && status.connected() && !status.blocked() {
            connect::close(&self.link.connection, &mut self.wire, close_limit).await;
        }
        self.wire.cut(cut_limit).await
    }
}

/// The connection that replaces the present one, which it is opened beside.
pub(crate) struct Successor<'a> {
    opening: Pin<&'a mut dyn Future<Output = Opened>>,
    pub(crate) opened: Option<Box<Opened>>,
}

impl<'a> Successor<'a> {
    pub(crate) fn new(opening: Pin<&'a mut dyn Future<Output = Opened>>) -> Self {
        let opened = None;
        Self { opening, opened }
    }

    /// Completes once it is open.
    pub(crate) async fn opens(&mut self) {
        match self.opened {
            Some(_) => pending().await,
            None => self.opened = Some(Box::new(self.opening.as_mut().await)),
        }
    }
}
