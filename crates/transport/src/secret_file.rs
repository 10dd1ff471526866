//! Reads a file with a secret, if it is private by the rule of core for the key of a server (libpq/be-secure-common.c,
//! check_ssl_key_file_permissions): it belongs to the user of the process and nobody else may access it, or it belongs
//! to root and its group may read it. Kubernetes mounts secrets in the second way.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Why a file is not used.
#[derive(Debug)]
pub enum SecretFileError {
    Unreadable(io::Error),
    /// Others could read or replace the secret: why, and what ends that.
    Exposed {
        why: &'static str,
        remedy: &'static str,
    },
}

impl fmt::Display for SecretFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "{error}"),
            Self::Exposed { why, remedy } => write!(f, "it {why}: {remedy} it"),
        }
    }
}

/// The content of a file that is private.
///
/// # Errors
/// Returns why the file is not used; the content is never part of it.
pub fn read_secret_file(path: &Path) -> Result<Vec<u8>, SecretFileError> {
    // SAFETY: it has no arguments and always succeeds.
    let user = unsafe { libc::geteuid() };
    let read = || {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let exposed = exposed(metadata.is_file(), metadata.uid(), metadata.mode(), user);
        let mut content = Vec::new();
        if exposed.is_none() {
            file.read_to_end(&mut content)?;
        }
        Ok((exposed, content))
    };
    match read().map_err(SecretFileError::Unreadable)? {
        (None, content) => Ok(content),
        (Some((why, remedy)), _) => Err(SecretFileError::Exposed { why, remedy }),
    }
}

/// Why a file is not private, and what to type in front of its name. `user` is that of the process; root reads the
/// files of all users, as with libpq.
fn exposed(is_file: bool, owner: u32, mode: u32, user: u32) -> Option<(&'static str, &'static str)> {
    let is_open = |others: u32| mode & others != 0;
    match owner {
        _ if !is_file => Some(("is not a regular file", "name a file instead of")),
        0 => is_open(0o037).then_some(("is open to others, or its group may write to it", "chmod 640")),
        owner if owner == user || user == 0 => is_open(0o077).then_some(("is open to group or others", "chmod 600")),
        _ => Some(("belongs to another user", "chown root")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_private_to_its_user_or_belongs_to_root_and_is_read_by_a_group() {
        let is_private = |owner, mode, user| exposed(true, owner, mode, user).is_none();
        for mode in [0o400, 0o600, 0o700] {
            assert!(
                is_private(26, mode, 26) && is_private(0, mode, 26) && is_private(26, mode, 0),
                "{mode:o}"
            );
            assert!(!is_private(27, mode, 26), "{mode:o} of another user");
        }
        for mode in [0o640, 0o440] {
            assert!(is_private(0, mode, 26) && is_private(0, mode, 0), "{mode:o} of root");
            assert!(!is_private(26, mode, 26) && !is_private(26, mode, 0), "{mode:o}");
        }
        for mode in [0o660, 0o650, 0o644, 0o604, 0o641, 0o642] {
            assert!(!is_private(0, mode, 26) && !is_private(26, mode, 26), "{mode:o}");
        }
        assert!(exposed(false, 26, 0o600, 26).is_some(), "a pipe");
    }
}
