//! A host may have several addresses, of which some do not answer. Which one is tried next, and for how long? Pure: the
//! time is an argument. Called by all that connect.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// What earlier connects have shown of the addresses of a host.
#[derive(Clone, Debug, Default)]
pub struct AddressOrder {
    /// Those that failed, the last one at the end.
    failed: Vec<SocketAddr>,
    /// The first address of the last round, unless one has answered since.
    first: Option<SocketAddr>,
}

impl AddressOrder {
    /// Records that a connect failed, or that a connection was lost: other addresses come first.
    pub fn failed(&mut self, address: SocketAddr) {
        self.failed.retain(|failed| *failed != address);
        self.failed.push(address);
    }

    /// Records that the peer works.
    pub fn answered(&mut self, address: SocketAddr) {
        self.failed.retain(|failed| *failed != address);
        self.first = None;
    }

    /// Begins a connect that may last until `until`. Each address is tried once.
    pub fn round(&mut self, mut addresses: Vec<SocketAddr>, until: Instant) -> AddressRound {
        self.failed.retain(|failed| addresses.contains(failed));
        let failure = |address: &SocketAddr| self.failed.iter().position(|failed| failed == address);
        addresses.sort_by_key(|address| failure(address).map_or(0, |at| at + 1));
        addresses.dedup();
        // The first address gets the most time. When all fail, another one is first each time.
        let have_all_failed = self.failed.len() == addresses.len();
        if have_all_failed && addresses.len() > 1 && addresses.first() == self.first.as_ref() {
            addresses.rotate_left(1);
        }
        self.first = addresses.first().copied();
        addresses.reverse();
        AddressRound {
            left: addresses,
            until,
            failures: Vec::new(),
        }
    }
}

/// One connect: the addresses that are left, and why the others failed.
#[derive(Debug)]
pub struct AddressRound {
    /// The next one last.
    left: Vec<SocketAddr>,
    until: Instant,
    failures: Vec<(SocketAddr, String)>,
}

impl AddressRound {
    /// The next address, and the time limit for all steps of connecting to it. None = none is left, or no time.
    pub fn next(&mut self, now: Instant) -> Option<(SocketAddr, Duration)> {
        let left = self.until.saturating_duration_since(now);
        let limit = share_of(left, self.left.len());
        (!left.is_zero()).then(|| Some((self.left.pop()?, limit))).flatten()
    }

    /// Records why the connect to an address failed.
    pub fn failed(&mut self, address: SocketAddr, why: String) {
        self.failures.push((address, why));
    }

    /// Why no address could be used. Names each that was tried, if there are several.
    pub fn reasons(&self) -> String {
        match &self.failures[..] {
            [] if self.left.is_empty() => "the host has no address".to_owned(),
            [] => "no time was left to connect".to_owned(),
            [(_, why)] => why.clone(),
            failures => {
                let named = failures.iter().map(|(address, why)| {
                    let name = format!("{address}: ");
                    match why.starts_with(&name) {
                        true => why.clone(),
                        false => name + why,
                    }
                });
                named.collect::<Vec<_>>().join("; ")
            }
        }
    }
}

/// How long the next address may take, of `addresses` that are left: half of the time left, the last one all of it.
fn share_of(left: Duration, addresses: usize) -> Duration {
    match addresses {
        0 | 1 => left,
        _ => left / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        ([10, 0, 0, last], 1).into()
    }

    fn at(s: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_secs(s)
    }

    /// The last parts of the addresses in the order of the next round.
    fn order(known: &mut AddressOrder, addresses: &[u8]) -> Vec<u8> {
        let addresses = addresses.iter().map(|last| address(*last));
        let mut round = known.round(addresses.collect(), at(16));
        let part = |address: SocketAddr| match address.ip() {
            std::net::IpAddr::V4(v4) => v4.octets()[3],
            std::net::IpAddr::V6(_) => 0,
        };
        std::iter::from_fn(|| round.next(at(0)))
            .map(|(address, _)| part(address))
            .collect()
    }

    #[test]
    fn each_address_gets_time_and_the_last_one_all_that_is_left() {
        let mut round = AddressOrder::default().round([1, 2, 3, 4].map(address).into(), at(16));
        for (now, last, limit) in [(0, 1, 8), (8, 2, 4), (12, 3, 2), (14, 4, 2)] {
            assert_eq!(round.next(at(now)), Some((address(last), Duration::from_secs(limit))));
        }
        assert_eq!(round.next(at(16)), None);
    }

    #[test]
    fn an_address_that_is_refused_leaves_its_time_to_the_next() {
        let mut round = AddressOrder::default().round([1, 2].map(address).into(), at(16));
        round.next(at(0));
        assert_eq!(round.next(at(1)), Some((address(2), Duration::from_secs(15))));
    }

    #[test]
    fn the_address_that_failed_last_comes_last_until_it_answers() {
        let mut known = AddressOrder::default();
        assert_eq!(order(&mut known, &[1, 2, 3]), [1, 2, 3]);
        known.failed(address(1));
        assert_eq!(order(&mut known, &[1, 2, 3]), [2, 3, 1]);
        known.failed(address(2));
        assert_eq!(
            order(&mut known, &[2, 1, 3]),
            [3, 1, 2],
            "whatever the order of the lookup"
        );
        known.answered(address(1));
        assert_eq!(order(&mut known, &[2, 1, 3]), [1, 3, 2]);
        assert_eq!(order(&mut known, &[2]), [2]);
    }

    #[test]
    fn when_all_addresses_fail_each_is_the_first_in_its_turn() {
        let mut known = AddressOrder::default();
        let mut firsts = Vec::new();
        for _ in 0..4 {
            let round = order(&mut known, &[1, 2, 3]);
            firsts.push(round[0]);
            round.into_iter().for_each(|last| known.failed(address(last)));
        }
        assert_eq!(firsts, [1, 2, 3, 1]);
    }

    #[test]
    fn of_two_addresses_that_are_lost_in_turn_the_other_one_is_next() {
        let mut known = AddressOrder::default();
        for lost in [1, 2, 1, 2] {
            assert_eq!(order(&mut known, &[1, 2])[0], lost);
            known.failed(address(lost));
        }
    }

    #[test]
    fn an_address_that_is_lost_comes_after_one_that_failed_before() {
        let mut known = AddressOrder::default();
        for _ in 0..3 {
            assert_eq!(order(&mut known, &[1, 2]), [1, 2]);
            known.failed(address(1));
            known.answered(address(2));
            known.failed(address(2));
        }
    }

    #[test]
    fn the_reasons_name_each_address_once_if_there_are_several() {
        let mut round = AddressOrder::default().round([1, 2].map(address).into(), at(1));
        round.next(at(0));
        round.failed(address(1), "it is silent".into());
        assert_eq!(round.reasons(), "it is silent");
        round.failed(address(2), "10.0.0.2:1: it refuses".into());
        assert_eq!(round.reasons(), "10.0.0.1:1: it is silent; 10.0.0.2:1: it refuses");
        let none = AddressOrder::default().round(Vec::new(), at(1));
        assert_eq!(none.reasons(), "the host has no address");
        let mut late = AddressOrder::default().round(vec![address(1)], at(1));
        assert_eq!(late.next(at(1)), None);
        assert_eq!(late.reasons(), "no time was left to connect");
    }
}
