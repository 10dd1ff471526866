//! Networks that a user names, as addresses with a number of bits: those that destinations may reach, and those of the
//! proxies of `outboxctl serve`. Callers pass canonical addresses: an IPv4 address is never a mapped IPv6 address.

use std::net::IpAddr;

/// A range of addresses that share their first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    pub address: IpAddr,
    pub bits: u32,
}

impl Network {
    /// An address, or a network such as `10.1.0.0/16`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let width = width(address);
        let bits = match bits {
            Some(bits) if bits.bytes().all(|b| b.is_ascii_digit()) => {
                bits.parse().ok().filter(|bits| *bits <= width)?
            }
            Some(_) => return None,
            None => width,
        };
        // A network of mapped addresses becomes an IPv4 network, because callers pass canonical addresses.
        Some(match address.to_canonical() {
            IpAddr::V4(canonical) if address.is_ipv6() => Self {
                address: canonical.into(),
                bits: bits.checked_sub(96)?,
            },
            _ => Self { address, bits },
        })
    }

    pub fn contains(self, address: IpAddr) -> bool {
        width(self.address) == width(address) && prefix(self.address, self.bits) == prefix(address, self.bits)
    }
}

fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The first bits of an address.
pub fn prefix(address: IpAddr, bits: u32) -> u128 {
    let value = match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    };
    value.checked_shr(width(address) - bits).unwrap_or(0)
}
