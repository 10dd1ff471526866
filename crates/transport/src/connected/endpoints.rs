//! The endpoints of a peer and their addresses: which one is connected to next, and the connection that replaces one that
//! has lived for long.
//!
//! Runs on the publisher thread. Lives as long as its destination.

use super::link::{Connection, Connector, Limit, Terms, Wire};
use crate::down::Fault;
use crate::lookup::Host;
use crate::pool;
use crate::transport::SharedPools;
use crate::url::Endpoint;
use std::cell::Cell;
use std::collections::VecDeque;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// The time limit for what serves a connection to notice that its socket is shut.
pub(crate) const CUT_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for each of several endpoints: the next one may answer immediately.
const ENDPOINT_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for closing a connection that was opened only as a probe.
const ASIDE_LIMIT: Duration = Duration::from_secs(1);
/// How often in its life a connection that could not be replaced is tried to be.
const RETRIES: u32 = 10;

/// The endpoints of a peer.
pub(crate) struct Endpoints<'a, C> {
    connector: C,
    pub(crate) terms: Terms,
    /// The one to connect to is the first.
    hosts: VecDeque<(Endpoint, Host)>,
    pub(crate) pools: &'a SharedPools,
    /// Whether the last connect failed after a long time.
    is_slow: Cell<bool>,
    /// The number of connections whose end could not be awaited.
    pub(crate) stuck: Cell<u32>,
    /// The endpoints that were tried one after the other without a wait.
    tried: usize,
    /// Why each connect to one of them failed.
    failures: Vec<String>,
}

impl<'a, C: Connector> Endpoints<'a, C> {
    pub(crate) fn new(connector: C, mut terms: Terms, pools: &'a SharedPools) -> Self {
        if terms.endpoints.len() > 1 {
            terms.connect_timeout = terms.connect_timeout.min(ENDPOINT_LIMIT);
        }
        let host = |endpoint: &Endpoint| (endpoint.clone(), pools.lookups.host(endpoint, &terms.allow));
        Self {
            hosts: terms.endpoints.iter().map(host).collect(),
            connector,
            terms,
            pools,
            is_slow: Cell::default(),
            stuck: Cell::default(),
            tried: 0,
            failures: Vec::new(),
        }
    }

    pub(crate) fn host(&self) -> &Host {
        &self.hosts[0].1
    }

    /// Names the endpoint in the text if there are several.
    pub(crate) fn at_endpoint(&self, fault: Fault) -> Fault {
        match self.hosts.len() {
            1 => fault,
            _ => fault.detailed(|detail| format!("{}: {detail}", self.hosts[0].0)),
        }
    }

    // ---- turns ------------------------------------------------------------------------------------------------------

    /// Goes to the next endpoint. Returns whether each has had its turn.
    pub(crate) fn go_on(&mut self) -> bool {
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

    /// Records a failed connect. Returns what to report if that was the last endpoint: while others may answer, the peer
    /// does not count as down.
    pub(crate) fn failed(&mut self, fault: &Fault) -> Option<Fault> {
        self.failures.push(fault.finding.detail.clone());
        let is_last = self.tried + 1 >= self.hosts.len();
        is_last.then(|| fault.clone().detailed(|_| self.failures.join("; ")))
    }

    // ---- connections ------------------------------------------------------------------------------------------------

    /// Connects to the first address of the endpoint that answers. If this future is dropped, a socket that it has
    /// opened is in `wire`.
    pub(crate) async fn open(&self, wire: &mut Option<C::Wire>) -> Result<Opened<C>, Fault> {
        let until = Instant::now() + self.terms.connect_timeout;
        let addresses = self.host().addresses(self.terms.connect_timeout).await?;
        let left = until.saturating_duration_since(Instant::now());
        // Not before the name is resolved: a lookup that hangs needs no thread of a connection.
        let slot = self.pools.pool.wait_for_slot(self.is_slow.get()).await;
        let opened = self.open_one_of(addresses, left, wire).await;
        self.is_slow.set(opened.is_err() && pool::is_slow(slot.elapsed()));
        opened
    }

    async fn open_one_of(
        &self,
        addresses: Vec<SocketAddr>,
        left: Duration,
        wire: &mut Option<C::Wire>,
    ) -> Result<Opened<C>, Fault> {
        let (endpoint, host) = &self.hosts[0];
        let mut connect = host.connect(addresses, Instant::now() + left);
        while let Some((address, limit)) = connect.next() {
            let connecting = self.connector.connect(endpoint, address, Limit::new(limit), wire);
            match connecting.await {
                Err(fault) => connect.failed(address, fault),
                Ok(connection) => {
                    if let Some(wire) = wire.take() {
                        host.answered(address);
                        return Ok(Opened {
                            address,
                            connection,
                            wire,
                        });
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

    /// Counts a connection that is not gone.
    pub(crate) fn count_stuck(&self, is_gone: bool) {
        self.stuck.set(self.stuck.get() + u32::from(!is_gone));
    }

    /// Whether the peer answers on another connection, which is opened for this and closed again. Tries the other
    /// endpoints and addresses first: the silent one may have lost its network.
    pub(crate) async fn answer_apart_from(&self, silent: SocketAddr) -> bool {
        let hosts = self
            .hosts
            .iter()
            .map(|(at, host)| (at.clone(), host.apart_from(silent)));
        let mut others = Self {
            hosts: hosts.collect(),
            ..Self::new(self.connector.clone(), self.terms.clone(), self.pools)
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
    pub(crate) async fn successor(&self) -> Opened<C> {
        let Some(life) = self.host().life(self.terms.connection_life) else {
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
pub(crate) struct Opened<C: Connector> {
    pub(crate) address: SocketAddr,
    pub(crate) connection: C::Connection,
    pub(crate) wire: C::Wire,
}

impl<C: Connector> Opened<C> {
    /// Closes the connection. A polite close is sent after the messages that are still buffered. Returns whether what
    /// serves the connection has ended.
    pub(crate) async fn close(mut self, is_polite: bool, close_limit: Duration, cut_limit: Duration) -> bool {
        if is_polite {
            self.connection.close(&mut self.wire, close_limit).await;
        }
        self.wire.cut(cut_limit).await
    }
}

/// The connection that replaces the present one, which it is opened beside.
pub(crate) struct Successor<'a, C: Connector> {
    opening: Pin<&'a mut dyn Future<Output = Opened<C>>>,
    pub(crate) opened: Option<Box<Opened<C>>>,
}

impl<'a, C: Connector> Successor<'a, C> {
    pub(crate) fn new(opening: Pin<&'a mut dyn Future<Output = Opened<C>>>) -> Self {
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
