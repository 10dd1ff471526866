//! A certificate authority for a test, and the certificates that it issues to servers and clients. Called by tests of
//! TLS.

use std::net::IpAddr;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType, date_time_ymd};

/// A certificate authority. It lives as long as its test.
pub struct Authority {
    pub cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its private key.
pub struct Certificate {
    pub cert_pem: String,
    pub key_pem: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = params(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            cert_pem: params.self_signed(&key).expect("a certificate").pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// Issues a certificate for a host, given its address or name, or for a client, given its name.
    pub fn issue(&self, name: &str) -> Certificate {
        self.sign(params_of(name))
    }

    /// Issues the certificate that [`Self::issue`] would, but expired in 2020.
    pub fn issue_expired(&self, name: &str) -> Certificate {
        let mut params = params_of(name);
        params.not_before = date_time_ymd(2019, 1, 1);
        params.not_after = date_time_ymd(2020, 2, 29);
        self.sign(params)
    }

    /// A self-signed certificate of an authority that a server presents as its own, as `openssl req -x509` makes it.
    pub fn self_signed(name: &str, expired: bool) -> Certificate {
        let key = KeyPair::generate().expect("a key");
        let mut params = params_of(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        if expired {
            params.not_before = date_time_ymd(2019, 1, 1);
            params.not_after = date_time_ymd(2020, 2, 29);
        }
        Certificate {
            cert_pem: params.self_signed(&key).expect("a certificate").pem(),
            key_pem: key.serialize_pem(),
        }
    }

    fn sign(&self, params: CertificateParams) -> Certificate {
        let key = KeyPair::generate().expect("a key");
        Certificate {
            cert_pem: params.signed_by(&key, &self.issuer).expect("a certificate").pem(),
            key_pem: key.serialize_pem(),
        }
    }
}

fn params(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

fn params_of(name: &str) -> CertificateParams {
    let mut params = params(name);
    params.subject_alt_names.push(match name.parse::<IpAddr>() {
        Ok(address) => SanType::IpAddress(address),
        Err(_) => SanType::DnsName(name.try_into().expect("ASCII")),
    });
    params
}
