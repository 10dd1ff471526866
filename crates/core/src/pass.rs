//! Decides whether a pass of a worker claims, and how long the worker sleeps before the next pass. Called by the
//! worker's main thread.
//!
//! No pass needs a wake: a wake only ends the sleep early. An outcome that other messages wait for ends it early, too.

/// The state of a worker, for one destination, on which the decision depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassState {
    /// Whether delivery is enabled.
    pub enabled: bool,
    /// Whether the destination can take messages.
    pub connected: bool,
    pub owned_partitions: usize,
    /// Number of messages in flight that count against the window.
    pub outstanding: usize,
    /// The most messages that may be outstanding.
    pub window: usize,
    /// Whether the bounded queue to the publisher has room for another batch.
    pub queue_has_room: bool,
    /// Whether the last claim left rows behind, so that there are probably more.
    pub last_claim_was_full: bool,
    /// The time until a message of the fast path is to be claimed, in ms, if a claim may be made; None = there is no
    /// such message.
    pub claims_fast_in_ms: Option<u32>,
    /// How long the worker sleeps, in ms, when it has nothing to do immediately.
    pub idle_backoff_ms: u32,
}

/// What a worker does next. The caller computes it at the start of a pass for `claim`, and again at the end for
/// `wait_ms`: only then does `last_claim_was_full` describe the claim of this pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextPass {
    /// The most rows to claim: the free part of the window, at least an eighth of it unless nothing is outstanding.
    /// None = do not claim.
    pub claim: Option<u32>,
    /// The longest sleep, in ms; a wake or an outcome ends it earlier.
    pub wait_ms: u32,
}

impl PassState {
    fn free(&self) -> usize {
        self.window.saturating_sub(self.outstanding)
    }

    /// Whether enough of the window is free for a claim. The worker does not claim for each single message that ends:
    /// near a full window that would be a transaction for a row or two.
    pub fn has_room(&self) -> bool {
        let free = self.free();
        free > 0 && (free >= self.window.div_ceil(8) || self.outstanding == 0)
    }
}

/// Decides what a worker in this state does next.
pub fn next(state: &PassState) -> NextPass {
    let may_claim =
        state.enabled && state.connected && state.owned_partitions > 0 && state.queue_has_room && state.has_room();
    if !may_claim {
        // The worker sleeps even if rows are left, because an immediate pass would find the same obstacle.
        return NextPass {
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
    NextPass {
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
            NextPass {
                claim: Some(90),
                wait_ms: 250
            }
        );
    }

    #[test]
    fn an_obstacle_prevents_a_claim_and_an_immediate_pass() {
        let obstacles = [
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
            }, // the window was reduced
            PassState {
                window: 0,
                outstanding: 0,
                ..READY
            },
        ];
        for state in obstacles {
            let hasty = PassState {
                last_claim_was_full: true,
                claims_fast_in_ms: Some(0),
                ..state
            };
            assert_eq!(
                next(&hasty),
                NextPass {
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
    fn after_a_full_claim_the_worker_does_not_sleep() {
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
    fn the_worker_wakes_to_claim_messages_of_the_fast_path() {
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
            NextPass {
                claim: None,
                wait_ms: 1
            }
        );
    }

    #[test]
    fn a_window_beyond_32_bits_does_not_overflow() {
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
