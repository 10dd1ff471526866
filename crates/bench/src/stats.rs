//! Statistics over samples. Pure.

/// The middle value, or the mean of the two middle ones. Panics without samples: a row has at least one pair.
pub fn median(samples: &[f64]) -> f64 {
    let sorted = sorted(samples);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    }
}

/// The smallest sample that at least `percent` of all samples do not exceed (nearest rank).
pub fn percentile(samples: &[f64], percent: f64) -> f64 {
    let sorted = sorted(samples);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

pub fn lowest(samples: &[f64]) -> f64 {
    percentile(samples, 0.0)
}

pub fn highest(samples: &[f64]) -> f64 {
    percentile(samples, 100.0)
}

/// The ratio ours ÷ theirs of each pair.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    assert_eq!(ours.len(), theirs.len(), "samples come in pairs");
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    assert!(!samples.is_empty(), "no samples");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middle_ones() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn a_percentile_is_a_sample_and_never_past_the_ends() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&hundred, 99.0), 99.0);
        assert_eq!(percentile(&hundred, 50.0), 50.0);
        assert_eq!((lowest(&hundred), highest(&hundred)), (1.0, 100.0));
        assert_eq!(percentile(&[5.0, 6.0], 99.0), 6.0);
        assert_eq!(percentile(&[5.0], 1.0), 5.0);
    }

    #[test]
    fn one_outlier_does_not_move_the_median_of_the_ratios() {
        // The third pair ran while the machine was busy: both sides are slow, and the ratio is the same.
        let ratios = ratios(&[90.0, 92.0, 45.0, 91.0, 10.0], &[100.0, 100.0, 50.0, 100.0, 100.0]);
        assert_eq!(median(&ratios), 0.9);
    }

    #[test]
    #[should_panic(expected = "samples come in pairs")]
    fn unpaired_samples_have_no_ratios() {
        ratios(&[1.0], &[1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "no samples")]
    fn no_samples_have_no_median() {
        median(&[]);
    }
}
