//! Whether a worker's pass claims, and how long the worker waits before the next. The worker calls it on its main
//! thread.
//!
//! No pass needs a wake: a wake only shortens the wait, and so does an outcome that another message waits for.

/// The state of a worker at this point of its loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassState {
    /// Delivery is switched on.
    pub enabled: bool,
    /// A destination can take messages.
    pub connected: bool,
    pub owned_partitions: usize,
    /// Messages handed over and without an outcome.
    pub outstanding: usize,
    /// The most that may be outstanding.
    pub window: usize,
    /// The bounded queue to the publisher takes another batch.
    pub queue_has_room: bool,
    /// The last claim brought as many rows as it asked for: there are probably more.
    pub last_claim_was_full: bool,
    /// Milliseconds until a message of the fast path must be claimed, if a claim may be made; None = there is none.
    pub claims_fast_in_ms: Option<u32>,
    /// The wait if nothing is urgent.
    pub idle_backoff_ms: u32,
}

/// Read `claim` at the start of a pass, and decide again after it for `wait_ms`: only then does `last_claim_was_full`
/// describe the claim just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Claim up to this many rows: the free part of the window, at least an eighth of it unless no message is
    /// outstanding.
    pub claim: Option<u32>,
    /// The longest wait; a wake or an outcome ends it earlier.
    pub wait_ms: u32,
}

impl PassState {
    fn free(&self) -> usize {
        self.window.saturating_sub(self.outstanding)
    }

    /// Whether enough of the window is free for a claim. Not for every message that ends: near a full window that would
    /// be a transaction for a row or two.
    pub fn has_room(&self) -> bool {
        let free = self.free();
        free > 0 && (free >= self.window.div_ceil(8) || self.outstanding == 0)
    }
}

pub fn next(state: &PassState) -> Next {
    let may_claim =
        state.enabled && state.connected && state.owned_partitions > 0 && state.queue_has_room && state.has_room();
    if !may_claim {
        // Even with rows left: an obstacle does not go away by trying again at once.
        return Next {
            claim: None,
            wait_ms: state.idle_backoff_ms.max(1),
        };
    }
    let free_slots = u32::try_from(state.free()).unwrap_or(u32::MAX);
    let wait_ms = if state.last_claim_was_full {
        0
    } else {
        state.idle_backoff_ms.max(1)
    };
    Next {
        claim: Some(free_slots),
        wait_ms: (state.claims_fast_in_ms).map_or(wait_ms, |ms| ms.min(wait_ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: PassState = PassState {
        enabled: true,
        connected: true,
        owned_partitions: 2,
        outstanding: 10,
        window: 100,
        queue_has_room: true,
        last_claim_was_full: false,
        claims_fast_in_ms: None,
        idle_backoff_ms: 250,
    };

    #[test]
    fn a_ready_worker_claims_the_free_slots_without_being_woken() {
        assert_eq!(
            next(&READY),
            Next {
                claim: Some(90),
                wait_ms: 250
            }
        );
    }

    #[test]
    fn no_message_is_claimed_while_there_is_an_obstacle() {
        let in_the_way = [
            PassState {
                enabled: false,
                ..READY
            },
            PassState {
                connected: false,
                ..READY
            },
            PassState {
                owned_partitions: 0,
                ..READY
            },
            PassState {
                queue_has_room: false,
                ..READY
            },
            PassState {
                outstanding: 100,
                ..READY
            },
            PassState {
                outstanding: 200,
                ..READY
            }, // the window was made smaller
            PassState {
                window: 0,
                outstanding: 0,
                ..READY
            },
        ];
        for state in in_the_way {
            let hasty = PassState {
                last_claim_was_full: true,
                claims_fast_in_ms: Some(0),
                ..state
            };
            assert_eq!(
                next(&hasty),
                Next {
                    claim: None,
                    wait_ms: 250
                },
                "{state:?}"
            );
        }
    }

    #[test]
    fn a_nearly_full_window_is_left_to_drain_before_the_next_claim() {
        assert_eq!(
            next(&PassState {
                outstanding: 88,
                ..READY
            })
            .claim,
            None
        );
        assert_eq!(
            next(&PassState {
                outstanding: 87,
                ..READY
            })
            .claim,
            Some(13)
        );
    }

    #[test]
    fn a_full_claim_leaves_no_time_to_sleep() {
        assert_eq!(
            next(&PassState {
                last_claim_was_full: true,
                ..READY
            })
            .wait_ms,
            0
        );
    }

    #[test]
    fn a_message_of_the_fast_path_ends_the_wait() {
        let fast_in_flight = |ms| PassState {
            claims_fast_in_ms: Some(ms),
            ..READY
        };
        assert_eq!([0, 40, 400].map(|ms| next(&fast_in_flight(ms)).wait_ms), [0, 40, 250]);
    }

    #[test]
    fn an_idle_worker_never_spins() {
        assert_eq!(
            next(&PassState {
                idle_backoff_ms: 0,
                ..READY
            })
            .wait_ms,
            1
        );
        assert_eq!(
            next(&PassState::default()),
            Next {
                claim: None,
                wait_ms: 1
            }
        );
    }

    #[test]
    fn a_window_beyond_32_bits_is_no_overflow() {
        assert_eq!(
            next(&PassState {
                window: usize::MAX,
                ..READY
            })
            .claim,
            Some(u32::MAX)
        );
    }
}
