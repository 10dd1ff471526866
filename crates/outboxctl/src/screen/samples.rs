//! The messages published each second while this program runs, from totals.

/// Ten minutes of seconds.
const SAMPLES_MAX: usize = 600;

#[derive(Clone, Debug)]
pub struct Samples {
    /// Oldest first.
    pub per_s: Vec<f64>,
    /// The shortest time of a sample.
    least_s: f64,
    /// The time at which the last sample ended, in seconds, and the total then.
    last: Option<(f64, u64)>,
}

impl Samples {
    pub fn new(least_s: f64) -> Self {
        Self {
            per_s: Vec::new(),
            least_s,
            last: None,
        }
    }

    /// Adds the total of a moment. None = it is unknown, and the next sample begins later.
    pub fn take(&mut self, now: Option<(f64, u64)>) {
        if let (Some((then_s, then)), Some((now_s, now))) = (self.last, now) {
            let span_s = now_s - then_s;
            if (0.0..self.least_s).contains(&span_s) {
                return;
            }
            // Counters start at zero again with the server.
            if span_s > 0.0 && now >= then {
                self.per_s.push((now - then) as f64 / span_s);
                let old = self.per_s.len().saturating_sub(SAMPLES_MAX);
                self.per_s.drain(..old);
            }
        }
        self.last = now;
    }
}
