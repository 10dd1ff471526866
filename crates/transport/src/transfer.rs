//! How long a peer may take for a message: first for its bytes, then for its answer. Pure: the time is an argument. For
//! AMQP it runs on `outbox-publish`, for HTTP on `outbox-http`.
//!
//! A timeout alone would cut a large message on a slow link and send it again for ever, and its neighbours with it. So
//! the timeout begins again with the bytes that the peer takes, if they come at the lowest rate that the destination
//! allows, or faster. Once the peer has all, only its answer counts.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The longest time for one message, whatever its bytes do. It is the longest timeout, too.
pub(crate) const LONGEST: Duration = Duration::from_secs(3600);
/// The lowest rate unless a destination has another one, in bytes a second. 64 requests at a time over a link of 400
/// kB/s have 6 kB/s each.
pub const MIN_SEND_RATE: u32 = 4096;

/// The limits of a destination for each of its messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferLimits {
    /// For the next bytes, and for the answer.
    pub(crate) timeout: Duration,
    /// The lowest rate of the bytes, in bytes a second.
    pub(crate) min_rate: u32,
}

/// The way of one message to the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    began: Instant,
    /// Since when the peer owes bytes, or the answer.
    owes_since: Instant,
    /// The bytes that the peer has taken. Those of messages before it on the connection count, too.
    taken: u64,
    is_sent: bool,
}

impl Transfer {
    pub(crate) fn begin(now: Instant) -> Self {
        Self {
            began: now,
            owes_since: now,
            taken: 0,
            is_sent: false,
        }
    }

    /// Begins again after a time in which the peer was not expected to take or to answer anything.
    pub(crate) fn resume(&mut self, now: Instant) {
        (self.began, self.owes_since, self.taken) = (now, now, 0);
    }

    /// Records that the peer has taken this number of bytes since the last time. They count for the time that they take
    /// at the lowest rate. A faster peer earns no time for later.
    pub(crate) fn record_taken(&mut self, bytes: u64, limits: TransferLimits, now: Instant) {
        if !self.is_sent {
            let micros = bytes.saturating_mul(1_000_000) / u64::from(limits.min_rate.max(1));
            let earned = Duration::from_micros(micros).min(LONGEST);
            self.owes_since = now.min(self.owes_since + earned);
            self.taken += bytes;
        }
    }

    /// Records that the peer has taken the last byte of the message.
    pub(crate) fn sent(&mut self, now: Instant) {
        if !self.is_sent {
            (self.is_sent, self.owes_since) = (true, now);
        }
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.is_sent
    }

    /// Since when the peer owes bytes, or the answer. A timeout later the message is out of time.
    pub(crate) fn owes_since(&self, limits: TransferLimits) -> Instant {
        let latest = self.began + LONGEST.saturating_sub(limits.timeout);
        self.owes_since.min(latest)
    }

    /// When the message is out of time if the peer takes nothing more.
    pub(crate) fn ends_at(&self, limits: TransferLimits) -> Instant {
        self.owes_since(limits) + limits.timeout
    }

    /// Why the message is out of time. `answer` is what the peer owes once it has all bytes.
    pub(crate) fn lateness(&self, limits: TransferLimits, answer: &str, now: Instant) -> String {
        let TransferLimits { timeout, min_rate } = limits;
        let (taken, elapsed) = (self.taken, now.saturating_duration_since(self.began));
        match self.is_sent || taken == 0 {
            true => format!("no {answer} within {timeout:?}"),
            false => format!(
                "the peer took {taken} bytes in {elapsed:.1?}, at last less than min_send_rate ({min_rate} a second)"
            ),
        }
    }
}

/// The time between two looks at what the peer has taken.
pub(crate) fn look_every(timeout: Duration) -> Duration {
    timeout / 8
}

/// The number of bytes that were written to the socket and that the peer has not acknowledged yet.
pub(crate) fn unacknowledged(socket: &impl AsRawFd) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: writes one int. A socket that is shut down has none left.
    unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    bytes.max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    const S: Duration = Duration::from_secs(1);
    const LIMITS: TransferLimits = TransferLimits {
        timeout: Duration::from_secs(30),
        min_rate: 1_000,
    };

    #[test]
    fn without_bytes_and_after_the_last_one_the_timeout_holds() {
        let start = Instant::now();
        let mut transfer = Transfer::begin(start);
        assert_eq!(transfer.ends_at(LIMITS), start + 30 * S);
        assert_eq!(
            transfer.lateness(LIMITS, "answer", start + 30 * S),
            "no answer within 30s"
        );
        transfer.record_taken(500, LIMITS, start + 20 * S);
        transfer.sent(start + 20 * S);
        assert_eq!(transfer.ends_at(LIMITS), start + 50 * S);
        transfer.record_taken(1_000_000, LIMITS, start + 40 * S); // of messages behind it
        transfer.sent(start + 40 * S);
        assert_eq!(transfer.ends_at(LIMITS), start + 50 * S);
        assert_eq!(
            transfer.lateness(LIMITS, "confirm", start + 50 * S),
            "no confirm within 30s"
        );
        transfer.resume(start + 45 * S);
        assert_eq!(transfer.ends_at(LIMITS), start + 75 * S);
    }

    #[test]
    fn fourteen_megabytes_at_400_kilobytes_a_second_arrive() {
        let start = Instant::now();
        let mut transfer = Transfer::begin(start);
        for s in 1..=35 {
            let now = start + S * s;
            assert!(now < transfer.ends_at(LIMITS), "{s} s");
            transfer.record_taken(400_000, LIMITS, now);
        }
        assert_eq!(transfer.ends_at(LIMITS), start + 65 * S);
    }

    #[test]
    fn bytes_below_the_lowest_rate_do_not_extend_the_timeout_for_long() {
        for burst in [0, 10_000_000] {
            let start = Instant::now();
            let mut transfer = Transfer::begin(start);
            transfer.record_taken(burst, LIMITS, start);
            let mut s = 0;
            while start + S * s < transfer.ends_at(LIMITS) {
                s += 1;
                transfer.record_taken(500, LIMITS, start + S * s);
            }
            assert_eq!(s, 60, "30 s, and half of the time");
            let (why, taken) = (transfer.lateness(LIMITS, "answer", start + S * s), burst + 30_000);
            let expected =
                format!("the peer took {taken} bytes in 60.0s, at last less than min_send_rate (1000 a second)");
            assert_eq!(why, expected);
        }
    }

    #[test]
    fn the_kernel_knows_what_the_peer_has_not_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut theirs = listener.accept().unwrap().0;
        ours.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(bytes) = ours.write(&[0; 65_536]) {
            written += bytes;
        }
        let left = unacknowledged(&ours);
        assert!(left > 0 && left < written as u64, "{left} of {written}");
        theirs.read_exact(&mut vec![0; written]).unwrap();
        let deadline = Instant::now() + 60 * S; // the last acknowledgement may come later
        while unacknowledged(&ours) > 0 {
            assert!(Instant::now() < deadline, "{} are left", unacknowledged(&ours));
            std::thread::yield_now();
        }
    }

    proptest! {
        #[test]
        fn no_message_takes_longer_than_the_longest_time_or_less_than_the_timeout(
            takes in prop::collection::vec((0u64..1 << 40, 0u64..2_000), 0..50),
            timeout_s in 1u64..=3_600,
            min_rate in 1u32..=i32::MAX as u32,
            is_sent in any::<bool>(),
        ) {
            let limits = TransferLimits { timeout: Duration::from_secs(timeout_s), min_rate };
            let start = Instant::now();
            let (mut transfer, mut now) = (Transfer::begin(start), start);
            for (bytes, seconds) in takes {
                let before = transfer.ends_at(limits);
                now += Duration::from_secs(seconds);
                transfer.record_taken(bytes, limits, now);
                prop_assert!(transfer.ends_at(limits) >= before);
            }
            if is_sent {
                transfer.sent(now);
            }
            let ends = transfer.ends_at(limits);
            prop_assert!(start + limits.timeout <= ends && ends <= start + LONGEST);
            prop_assert!(ends <= now + limits.timeout);
        }
    }
}
