//! Decides whether a destination may reach an address. Pure; both transports call it just before they connect.
//!
//! The trap: a server inside a network can reach what its users cannot: cloud metadata, databases, the loopback address
//! of the machine. A public host name in a URL proves nothing: it may resolve to any address, and to another one next
//! time. So this module checks the address that the socket connects to, at each connect. An IPv6 address that carries
//! an IPv4 address (mapped, translated, tunnelled) is checked as that IPv4 address. The table follows IANA's
//! special-purpose registries.

use crate::down::{DownReason, Fault};
use crate::network::{Network, prefix};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Hosts and networks that may be reached although their addresses are not public.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    networks: Vec<Network>,
    /// In lower case, without a trailing dot.
    hosts: Vec<String>,
    /// Whether private networks are allowed: brokers are usually in one.
    private: bool,
}

impl AllowList {
    /// Parses host names, addresses and networks (`10.1.0.0/16`, `fd12::/16`), separated by commas or white space.
    /// Err: the entry that is neither a network nor a host.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut list = Self::default();
        for entry in text.split(|c: char| c == ',' || c.is_whitespace()) {
            if entry.is_empty() {
                continue;
            }
            if let Some(network) = Network::parse(entry) {
                list.networks.push(network);
            } else if is_host_name(entry) {
                list.hosts.push(plain_host(entry));
            } else {
                let entry: String = entry.chars().take(80).collect();
                let what = "is not a host name, an address or a network such as 10.1.0.0/16";
                return Err(format!("\"{entry}\" {what}"));
            }
        }
        Ok(list)
    }

    /// Allows every address.
    pub fn any() -> Self {
        let all = |address| Network { address, bits: 0 };
        Self {
            networks: vec![all(Ipv4Addr::UNSPECIFIED.into()), all(Ipv6Addr::UNSPECIFIED.into())],
            ..Self::default()
        }
    }

    /// Allows private networks too, but not the machine itself nor the addresses that belong to its network or cloud.
    #[must_use]
    pub fn and_private(self) -> Self {
        Self { private: true, ..self }
    }

    /// Those of the addresses of `host` that may be reached. Err if all of them are refused.
    pub(crate) fn permitted(&self, host: &str, mut addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Fault> {
        let mut refused = None;
        addresses.retain(|address| match self.refusal(host, address.ip()) {
            Some(class) => {
                refused = Some((address.ip(), class));
                false
            }
            None => true,
        });
        match refused {
            Some((address, class)) if addresses.is_empty() => {
                let mut fault = Fault::new(DownReason::ADDRESS_REFUSED, format!("{address} is {class}"));
                fault.finding = fault.finding.with("address", address.to_string());
                Err(fault)
            }
            _ => Ok(addresses),
        }
    }

    /// Why nothing may be sent to a host that is an address or `localhost`; None for any other name, which may resolve
    /// to whatever address later.
    pub(crate) fn refusal_of(&self, host: &str) -> Option<String> {
        let address = match plain_host(host).as_str() {
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            host => host.parse().ok()?,
        };
        let class = self.refusal(host, address)?;
        Some(format!("{host} is {class}"))
    }

    /// Why no request may be sent to `address`, as a phrase; None if one may. `host` is the host in the URL.
    fn refusal(&self, host: &str, address: IpAddr) -> Option<&'static str> {
        let address = address.to_canonical(); // the socket connects to the IPv4 address inside a mapped one
        let class = class(address)?;
        let allowed = self.private && matches!(class, PRIVATE | SHARED)
            || self.networks.iter().any(|network| network.contains(address))
            || self.hosts.iter().any(|allowed| *allowed == plain_host(host));
        (!allowed).then_some(class)
    }
}

fn plain_host(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

/// Whether `text` is a host name. A last label of digits would be an address in an old notation, such as 10.1 or
/// 0x7f.1.
fn is_host_name(text: &str) -> bool {
    let legal = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | '_');
    let last = plain_host(text);
    let last = last.rsplit('.').next().unwrap_or_default();
    text.chars().all(legal) && last.starts_with(char::is_alphabetic)
}

/// The kind of a special address; None for a public one.
fn class(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) => class_v4(v4),
        IpAddr::V6(v6) => class_v6(v6),
    }
}

const METADATA: &str = "a metadata address of a cloud";
const PRIVATE: &str = "a private address";
const SHARED: &str = "an address of carrier-grade NAT";
const RESERVED: &str = "a reserved address";
const LINK_LOCAL: &str = "a link-local address";
const MULTICAST: &str = "a multicast address";

/// Special IPv4 ranges: network, prefix length, kind. The first match counts.
const SPECIAL_V4: [([u8; 4], u32, &str); 20] = [
    ([169, 254, 169, 254], 32, METADATA), // AWS, Google, Azure, and many others
    ([169, 254, 170, 2], 32, METADATA),   // AWS, of containers
    ([168, 63, 129, 16], 32, METADATA),   // Azure; of a public network
    ([100, 100, 100, 200], 32, METADATA), // Alibaba
    ([192, 0, 0, 192], 32, METADATA),     // Oracle
    ([0, 0, 0, 0], 8, "an unspecified address"),
    ([10, 0, 0, 0], 8, PRIVATE),
    ([100, 64, 0, 0], 10, SHARED),
    ([127, 0, 0, 0], 8, "a loopback address"),
    ([169, 254, 0, 0], 16, LINK_LOCAL),
    ([172, 16, 0, 0], 12, PRIVATE),
    ([192, 0, 0, 0], 24, RESERVED),
    ([192, 0, 2, 0], 24, RESERVED),
    ([192, 88, 99, 0], 24, RESERVED), // relays of 6to4
    ([192, 168, 0, 0], 16, PRIVATE),
    ([198, 18, 0, 0], 15, RESERVED),
    ([198, 51, 100, 0], 24, RESERVED),
    ([203, 0, 113, 0], 24, RESERVED),
    ([224, 0, 0, 0], 4, MULTICAST),
    ([240, 0, 0, 0], 4, RESERVED),
];

fn class_v4(address: Ipv4Addr) -> Option<&'static str> {
    let mut special = SPECIAL_V4.iter();
    special
        .find(|(network, bits, _)| prefix(Ipv4Addr::from(*network).into(), *bits) == prefix(address.into(), *bits))
        .map(|(_, _, class)| *class)
}

fn class_v6(address: Ipv6Addr) -> Option<&'static str> {
    let words = address.segments();
    let embedded = |high: u16, low: u16| Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match words {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("an unspecified address"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("a loopback address"),
        [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254] => Some(METADATA), // AWS
        [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254] => Some(METADATA),  // Google
        [0xff00..=0xffff, ..] => Some(MULTICAST),
        [0xfe80..=0xfebf, ..] => Some(LINK_LOCAL),
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Some(PRIVATE), // unique-local; site-local, as it once was
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => class_v4(embedded(high, low)), // NAT64
        [0x2002, high, low, ..] => class_v4(embedded(high, low)),       // 6to4
        [0x2001, 0..=0x1ff, ..] => Some(RESERVED),                      // Teredo, ORCHID and other protocols
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Some(RESERVED), // for documentation
        [0x2000..=0x3fff, ..] => None,
        // IANA has allocated no other range to hosts.
        _ => Some(RESERVED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(allowed: &str, host: &str, address: &str) -> Option<&'static str> {
        let list = AllowList::parse(allowed).unwrap();
        list.refusal(host, address.parse().unwrap())
    }

    #[test]
    fn public_addresses_may_be_reached() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.17",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450:4001:82a::200e",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2002:808:808::1",
            "2001:200::1",
        ] {
            assert_eq!(refusal("", "example.com", address), None, "{address}");
        }
    }

    #[test]
    fn every_other_address_is_refused_and_named() {
        for (address, class) in [
            ("0.0.0.0", "an unspecified address"),
            ("0.1.2.3", "an unspecified address"),
            ("127.0.0.1", "a loopback address"),
            ("127.255.255.254", "a loopback address"),
            ("10.0.0.0", PRIVATE),
            ("10.255.255.255", PRIVATE),
            ("172.16.0.0", PRIVATE),
            ("172.31.255.255", PRIVATE),
            ("192.168.1.1", PRIVATE),
            ("100.64.0.0", "an address of carrier-grade NAT"),
            ("100.127.255.255", "an address of carrier-grade NAT"),
            ("169.254.1.1", LINK_LOCAL),
            ("169.254.169.254", METADATA),
            ("169.254.170.2", METADATA),
            ("168.63.129.16", METADATA),
            ("100.100.100.200", METADATA),
            ("192.0.0.192", METADATA),
            ("192.0.2.1", RESERVED),
            ("198.19.255.255", RESERVED),
            ("203.0.113.9", RESERVED),
            ("224.0.0.1", MULTICAST),
            ("239.255.255.255", MULTICAST),
            ("240.0.0.1", RESERVED),
            ("255.255.255.255", RESERVED),
            ("::", "an unspecified address"),
            ("::1", "a loopback address"),
            ("::ffff:127.0.0.1", "a loopback address"),
            ("::ffff:a9fe:a9fe", METADATA),
            ("::ffff:10.0.0.1", PRIVATE),
            ("::127.0.0.1", RESERVED),
            ("64:ff9b::10.0.0.1", PRIVATE),
            ("64:ff9b::169.254.169.254", METADATA),
            ("64:ff9b:1::1", RESERVED),
            ("2002:7f00:1::1", "a loopback address"),
            ("2001:0:4136:e378:8000:63bf:3fff:fdd2", RESERVED),
            ("2001:db8::1", RESERVED),
            ("3fff::1", RESERVED),
            ("fe80::1", LINK_LOCAL),
            ("febf::1", LINK_LOCAL),
            ("fec0::1", PRIVATE),
            ("fc00::1", PRIVATE),
            ("fdff:ffff::1", PRIVATE),
            ("fd00:ec2::254", METADATA),
            ("fd20:ce::254", METADATA),
            ("ff02::1", MULTICAST),
            ("100::1", RESERVED),
            ("5f00::1", RESERVED),
            ("4000::1", RESERVED),
        ] {
            assert_eq!(refusal("", "example.com", address), Some(class), "{address}");
        }
    }

    #[test]
    fn the_list_allows_networks_addresses_and_hosts() {
        let list = "10.1.0.0/16, 192.168.7.7 fd12::/16\nhooks.internal,::ffff:10.9.0.0/112";
        for (host, address) in [
            ("x", "10.1.2.3"),
            ("x", "::ffff:10.1.2.3"),
            ("x", "10.9.0.1"),
            ("x", "192.168.7.7"),
            ("x", "fd12:3456::1"),
            ("hooks.internal", "10.2.0.1"),
            ("HOOKS.internal.", "127.0.0.1"),
        ] {
            assert_eq!(refusal(list, host, address), None, "{host} {address}");
        }
        for (host, address) in [
            ("x", "10.2.0.1"),
            ("x", "192.168.7.8"),
            ("x", "fd13::1"),
            ("x", "10.10.0.1"),
            ("not-hooks.internal", "10.2.0.1"),
            ("hooks.internal.evil.com", "10.2.0.1"),
        ] {
            assert!(refusal(list, host, address).is_some(), "{host} {address}");
        }
    }

    #[test]
    fn private_networks_are_allowed_to_a_broker_and_the_machine_and_its_cloud_are_not() {
        let broker = AllowList::default().and_private();
        let refusal = |address: &str| broker.refusal("h", address.parse().unwrap());
        for address in [
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "fd12::1",
            "1.1.1.1",
        ] {
            assert_eq!(refusal(address), None, "{address}");
        }
        for (address, class) in [
            ("127.0.0.1", "a loopback address"),
            ("::1", "a loopback address"),
            ("::ffff:127.0.0.1", "a loopback address"),
            ("0.0.0.0", "an unspecified address"),
            ("169.254.169.254", METADATA),
            ("100.100.100.200", METADATA),
            ("fd00:ec2::254", METADATA),
            ("169.254.1.1", LINK_LOCAL),
            ("fe80::1", LINK_LOCAL),
            ("224.0.0.1", MULTICAST),
            ("240.0.0.1", RESERVED),
        ] {
            assert_eq!(refusal(address), Some(class), "{address}");
            assert_eq!(
                AllowList::any().refusal("h", address.parse().unwrap()),
                None,
                "{address}"
            );
        }
    }

    #[test]
    fn an_entry_that_is_neither_network_nor_host_is_refused() {
        for bad in [
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "fd00::/129",
            "10.1",
            "0x7f.1",
            "a/b",
            "[::1]",
            "::ffff:10.0.0.0/8",
            "*",
        ] {
            assert!(AllowList::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(AllowList::parse(" , "), Ok(AllowList::default()));
    }

    proptest! {
        #[test]
        fn a_mapped_address_is_checked_as_the_one_it_carries(bits: u32) {
            let v4 = Ipv4Addr::from(bits);
            let none = AllowList::default();
            let expected = none.refusal("h", v4.into());
            prop_assert_eq!(none.refusal("h", v4.to_ipv6_mapped().into()), expected);
            let [a, b, c, d] = v4.octets().map(u16::from);
            let nat64 = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, a << 8 | b, c << 8 | d);
            prop_assert_eq!(none.refusal("h", nat64.into()), expected);
        }

        #[test]
        fn every_address_that_std_calls_internal_is_refused(bits: u32, wide: u128) {
            let none = AllowList::default();
            let v4 = Ipv4Addr::from(bits);
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_unspecified() || v4.is_broadcast() || v4.is_documentation() {
                prop_assert!(none.refusal("h", v4.into()).is_some());
            }
            let v6 = Ipv6Addr::from(wide);
            if v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_multicast() || v6.is_loopback() {
                prop_assert!(none.refusal("h", v6.into()).is_some());
            }
        }

        #[test]
        fn a_network_allows_its_addresses_and_no_others(bits: u32, length in 0u32..=32, other: u32) {
            let list = AllowList::parse(&format!("{}/{length}", Ipv4Addr::from(bits))).unwrap();
            let inside = length == 0 || bits >> (32 - length) == other >> (32 - length);
            let network = list.networks[0];
            prop_assert_eq!(network.contains(Ipv4Addr::from(other).into()), inside);
            prop_assert!(!network.contains(Ipv6Addr::from(u128::from(other)).into()));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = AllowList::parse(&text);
        }
    }
}
