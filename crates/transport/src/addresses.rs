//! A host may have several addresses, of which some do not answer. Pure; called by each transport when it connects.

use std::time::Duration;

/// How long the next address may take, of `addresses` that are left: half of the time left, the last one all of it.
pub(crate) fn share_of(left: Duration, addresses: usize) -> Duration {
    match addresses {
        0 | 1 => left,
        _ => left / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_gets_time_and_the_last_one_all_that_is_left() {
        let mut left = Duration::from_secs(16);
        let shares = [4, 3, 2, 1].map(|addresses| {
            let share = share_of(left, addresses);
            left -= share;
            share.as_secs()
        });
        assert_eq!(shares, [8, 4, 2, 2]);
    }
}
