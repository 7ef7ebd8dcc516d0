//! What does a list of times look like? As numpy counts, since published results do.

/// Mean, spread and percentiles of a list; all 0 for an empty one, as vLLM's benchmark has it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Sum over count.
    pub mean: f64,
    /// The 50th percentile.
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    /// The 50th, 90th, 95th and 99th percentile, by linear interpolation between the two nearest.
    pub percentiles: [f64; 4],
}

/// Which percentiles are told.
pub const PERCENTILES: [u32; 4] = [50, 90, 95, 99];

impl Statistics {
    /// Sorts the values and looks.
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        Self {
            mean,
            median: percentile(&values, 50),
            std: variance.sqrt(),
            percentiles: PERCENTILES.map(|percent| percentile(&values, percent)),
        }
    }
}

/// `sorted` must hold something.
fn percentile(sorted: &[f64], percent: u32) -> f64 {
    let place = (sorted.len() - 1) as f64 * f64::from(percent) / 100.0;
    let below = place.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    /// Values computed with Python from the same definitions: [15, 20, 35, 40, 50, 1].
    #[test]
    fn percentiles_lie_between_the_two_nearest() {
        let seen = Statistics::of(vec![15.0, 20.0, 35.0, 40.0, 50.0, 1.0]);
        assert!(close(seen.mean, 26.833_333_333_333_332));
        assert!(close(seen.median, 27.5));
        assert!(close(seen.std, 16.486_526_485_453_37));
        let due = [27.5, 45.0, 47.5, 49.5];
        assert!(seen.percentiles.iter().zip(due).all(|(seen, due)| close(*seen, due)), "{seen:?}");
    }

    #[test]
    fn nothing_is_0_and_one_value_is_itself() {
        assert_eq!(Statistics::of(Vec::new()), Statistics::default());
        let one = Statistics::of(vec![3.5]);
        assert_eq!((one.mean, one.std, one.percentiles), (3.5, 0.0, [3.5; 4]));
    }
}
