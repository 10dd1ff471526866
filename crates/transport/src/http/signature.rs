//! Signs a message as the Standard Webhooks specification demands (standardwebhooks.com, 1.0.0), so that receivers can
//! verify it with any library for that standard. Pure; called by `http::request` on the request threads, and by a
//! receiver.

use crate::Secret;
use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

const PREFIX: &str = "whsec_";
/// The range of key lengths, in bytes, that the standard allows.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;
/// The standard's libraries accept a secret with or without base64 padding.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Signs with each of its keys. While a secret is rotated, a receiver may know only the old one or only the new one.
#[derive(Clone)]
pub struct Signer(Vec<Hmac<Sha256>>);

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signer({} keys)", self.0.len())
    }
}

impl Signer {
    /// Takes secrets of the form `whsec_` plus base64. The error never repeats a secret.
    pub fn new(secrets: &[Secret]) -> Result<Self, String> {
        secrets.iter().map(key).collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of the header `webhook-signature`.
    pub fn sign(&self, id: &str, timestamp_s: u64, body: &[u8]) -> String {
        let signed = self.macs(id, timestamp_s, body);
        let signed = signed.map(|mac| format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())));
        signed.collect::<Vec<_>>().join(" ")
    }

    /// Whether one of these signatures, of the header `webhook-signature`, is by one of the keys.
    pub fn verifies(&self, id: &str, timestamp_s: u64, body: &[u8], signatures: &str) -> bool {
        let given = signatures.split(' ').filter_map(|given| given.strip_prefix("v1,"));
        let given: Vec<_> = given.filter_map(|given| STANDARD.decode(given).ok()).collect();
        self.macs(id, timestamp_s, body)
            .any(|mac| given.iter().any(|given| mac.clone().verify_slice(given).is_ok()))
    }

    fn macs(&self, id: &str, timestamp_s: u64, body: &[u8]) -> impl Iterator<Item = Hmac<Sha256>> {
        self.0.iter().map(move |key| {
            let mut mac = key.clone();
            mac.update(format!("{id}.{timestamp_s}.").as_bytes());
            mac.update(body);
            mac
        })
    }
}

fn key(secret: &Secret) -> Result<Hmac<Sha256>, String> {
    let coded = secret.reveal().strip_prefix(PREFIX);
    let coded = coded.ok_or_else(|| format!("a signing secret must begin with {PREFIX}"))?;
    let key = LENIENT.decode(coded);
    let key = key.map_err(|_| format!("a signing secret must be base64 after {PREFIX}"))?;
    if !KEY_BYTES.contains(&key.len()) {
        return Err(format!(
            "a signing secret must be {} to {} bytes long, not {}",
            KEY_BYTES.start(),
            KEY_BYTES.end(),
            key.len()
        ));
    }
    Hmac::new_from_slice(&key).map_err(|_| "the length of a signing secret is not valid for HMAC".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    fn signer(secrets: &[&str]) -> Result<Signer, String> {
        Signer::new(&secrets.iter().map(|s| Secret::new(*s)).collect::<Vec<_>>())
    }

    #[test]
    fn the_signature_matches_the_test_vector_of_the_standards_libraries() {
        // From libraries/*/test* of github.com/standard-webhooks/standard-webhooks; each language has the same vector.
        let signature = signer(&[SECRET]).unwrap().sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn each_secret_signs_and_the_current_one_first() {
        let old = format!("whsec_{}", STANDARD.encode([7; 32]));
        let alone = |secret: &str| signer(&[secret]).unwrap().sign("id", 1, b"body");
        let both = signer(&[SECRET, &old]).unwrap().sign("id", 1, b"body");
        assert_eq!(both, format!("{} {}", alone(SECRET), alone(&old)));
        assert_eq!(alone(old.trim_end_matches('=')), alone(&old), "padding or none");
        assert_eq!(signer(&[]).unwrap().sign("id", 1, b"body"), "");
    }

    #[test]
    fn an_invalid_secret_is_refused_and_not_repeated() {
        let of = |bytes: usize| format!("whsec_{}", STANDARD.encode(vec![b'x'; bytes]));
        for bad in [
            "",
            "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "whsec_",
            "whsec_hunter2 hunter2 hunter2 hunter2",
            &of(23),
            &of(65),
        ] {
            let error = signer(&[bad]).unwrap_err();
            assert!(!error.contains("hunter2") && !error.contains("eHh4"), "{error}");
        }
        assert!(signer(&[&of(24)]).is_ok() && signer(&[&of(64)]).is_ok());
        assert_eq!(format!("{:?}", signer(&[SECRET]).unwrap()), "Signer(1 keys)");
    }
}
