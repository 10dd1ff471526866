//! Users of a proxy that signs them in: the proxy names the user in a header. The monitor believes the header only on
//! connections from the proxy, and refuses every other request that has it.

use super::session_pool::USER_MAX_BYTES;
use axum::http::{HeaderMap, HeaderName};
use outbox_transport::network::Network;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address from which a client has connected, in canonical form. `connections` adds it to each request.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddress(pub IpAddr);

#[derive(Debug)]
pub struct TrustedProxy {
    header: HeaderName,
    networks: Vec<Network>,
}

impl TrustedProxy {
    /// Without a network the proxy is on this machine.
    pub fn new(header: HeaderName, networks: &[Network]) -> Self {
        let [v4, v6] = [Ipv4Addr::new(127, 0, 0, 0).into(), Ipv6Addr::LOCALHOST.into()];
        let loopback = [(v4, 8), (v6, 128)].map(|(address, bits)| Network { address, bits });
        let networks = if networks.is_empty() { &loopback } else { networks };
        Self {
            header,
            networks: networks.to_vec(),
        }
    }

    /// The user whom the proxy names. `None` = the request does not have the header. Err: why it is refused.
    pub fn user<'a>(&self, headers: &'a HeaderMap, peer: Option<PeerAddress>) -> Result<Option<&'a str>, &'static str> {
        let mut values = headers.get_all(&self.header).iter();
        let Some(value) = values.next() else {
            return Ok(None);
        };
        let comes_from = |peer: PeerAddress| self.networks.iter().any(|network| network.contains(peer.0));
        if !peer.is_some_and(comes_from) {
            return Err("The request has the header of users of a proxy, and does not come from the proxy.\n");
        }
        // The audit has the name: it must arrive there as it is, and no other name may look like it.
        let is_plain = |byte: &u8| (b' '..=b'~').contains(byte);
        let name = value.to_str().map(str::trim).unwrap_or_default();
        if name.is_empty() || name.len() > USER_MAX_BYTES || !name.as_bytes().iter().all(is_plain) {
            return Err(
                "The proxy names a user with no character, with too many, or with others than those of ASCII.\n",
            );
        }
        match values.next() {
            Some(_) => Err("The proxy names several users.\n"),
            None => Ok(Some(name)),
        }
    }
}

pub fn parse_header(text: &str) -> Result<HeaderName, String> {
    let name: HeaderName = text
        .parse()
        .map_err(|_| "give the name of a header, such as X-Remote-User".to_owned())?;
    match ["authorization", "connection", "cookie", "host", "origin", "referer"].contains(&name.as_str()) {
        true => Err(format!("browsers and programs send {name} themselves")),
        false => Ok(name),
    }
}

pub fn parse_network(text: &str) -> Result<Network, String> {
    Network::parse(text).ok_or_else(|| "give an address or a network, such as 10.1.0.0/16".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    const NAME: &str = "x-remote-user";

    fn user(values: &[&[u8]], peer: &str, networks: &[&str]) -> Result<Option<String>, &'static str> {
        let networks: Vec<Network> = networks.iter().map(|text| parse_network(text).unwrap()).collect();
        let proxy = TrustedProxy::new(parse_header("X-Remote-User").unwrap(), &networks);
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(NAME, HeaderValue::from_bytes(value).unwrap());
        }
        let peer = PeerAddress(peer.parse().unwrap());
        proxy.user(&headers, Some(peer)).map(|name| name.map(str::to_owned))
    }

    #[test]
    fn a_user_is_named_by_the_proxy_alone() {
        let kim = Ok(Some("kim@shop.example".to_owned()));
        let named = |peer: &str, networks: &[&str]| user(&[b"kim@shop.example"], peer, networks);
        assert_eq!(named("127.0.0.1", &[]), kim);
        assert_eq!(named("127.9.9.9", &[]), kim);
        assert_eq!(named("::1", &[]), kim);
        assert_eq!(named("10.1.2.3", &["10.1.0.0/16", "fd12::/16"]), kim);
        assert_eq!(named("fd12::7", &["10.1.0.0/16", "fd12::/16"]), kim);
        for (peer, networks) in [
            ("10.1.2.3", &[][..]),
            ("::2", &[]),
            ("10.2.0.1", &["10.1.0.0/16"]),
            ("127.0.0.1", &["10.1.0.0/16"]), // not named, so not trusted
        ] {
            assert!(named(peer, networks).is_err(), "{peer} {networks:?}");
        }
        assert_eq!(user(&[], "10.1.2.3", &[]), Ok(None), "no header is no claim");
    }

    #[test]
    fn a_name_that_the_audit_could_not_show_is_refused() {
        let longest = [b'k'; USER_MAX_BYTES];
        assert_eq!(user(&[&longest], "::1", &[]), Ok(Some("k".repeat(USER_MAX_BYTES))));
        assert_eq!(user(&[b"Kim Lee"], "::1", &[]), Ok(Some("Kim Lee".into())));
        for values in [
            &[&b"kim"[..], b"lee"][..],
            &[b"kim", b"kim"],
            &[b"", b"kim"],
            &[b""],
            &[b"  "],
            &[&[b'k'; USER_MAX_BYTES + 1]],
            &[b"kim\tlee"],
            &["größe".as_bytes()],
            &[b"kim\xff"],
        ] {
            assert!(user(values, "127.0.0.1", &[]).is_err(), "{values:?}");
        }
    }

    #[test]
    fn a_header_that_every_client_sends_names_no_user() {
        for text in ["", "a b", "x\n", "Host", "Cookie", "Authorization"] {
            assert!(parse_header(text).is_err(), "{text}");
        }
        for text in ["", "10.0.0.0/33", "proxy.example", "10.0.0.0/8,::1"] {
            assert!(parse_network(text).is_err(), "{text}");
        }
    }
}
