//! `--rate`: records at even distances.

use std::time::Duration;

use tokio::time::Instant;

use crate::text::rate::Rate;

/// A pace that fell behind (slow input, slow brokers) makes up for this much and no more: what comes
/// afterwards is no burst. Timers are good to a millisecond.
const CATCH_UP: Duration = Duration::from_millis(20);

/// Says when the next record may go. Record n is due at `base + n / rate`.
#[derive(Debug)]
pub struct Pace {
    rate: Option<f64>,
    base: Instant,
    /// Records since `base`.
    count: u64,
}

impl Pace {
    /// Starts now; without a rate nothing waits.
    pub fn new(rate: Option<Rate>) -> Self {
        Self {
            rate: rate.map(Rate::per_second),
            base: Instant::now(),
            count: 0,
        }
    }

    /// Waits until the next record may go.
    ///
    /// # Cancel safety
    /// Cancelled, it can be called again for the same record.
    pub async fn wait(&mut self) {
        let Some(rate) = self.rate else {
            return;
        };
        #[allow(clippy::cast_precision_loss)]
        let after = Duration::try_from_secs_f64(self.count as f64 / rate);
        let due = after.ok().and_then(|after| self.base.checked_add(after));
        let now = Instant::now();
        match due {
            Some(due) if due > now => {
                tokio::time::sleep_until(due).await;
                self.count += 1;
            }
            Some(due) if now.duration_since(due) <= CATCH_UP => self.count += 1,
            _ => {
                self.base = now;
                self.count = 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::rate;

    fn pace(text: &str) -> Pace {
        Pace::new(rate::parse(text).ok())
    }

    #[tokio::test(start_paused = true)]
    async fn records_of_a_steady_input_go_at_even_distances() {
        let mut pace = pace("4");
        let start = Instant::now();
        let mut at = Vec::new();
        for _ in 0..5 {
            pace.wait().await;
            at.push(start.elapsed().as_millis());
        }
        assert_eq!(at, [0, 250, 500, 750, 1000]);
    }

    #[tokio::test(start_paused = true)]
    async fn pace_after_a_pause_of_the_input_does_not_make_up_for_it() {
        let mut pace = pace("10");
        pace.wait().await;
        tokio::time::advance(Duration::from_secs(60)).await;
        let start = Instant::now();
        let mut at = Vec::new();
        for _ in 0..3 {
            pace.wait().await;
            at.push(start.elapsed().as_millis());
        }
        assert_eq!(at, [0, 100, 200]);
    }

    #[tokio::test(start_paused = true)]
    async fn pace_slightly_late_keeps_its_average() {
        let mut pace = pace("100");
        let start = Instant::now();
        for _ in 0..100 {
            pace.wait().await;
            // Each record takes longer than its share now and then, less than `CATCH_UP` behind.
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        pace.wait().await;
        assert_eq!(start.elapsed(), Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn pace_without_a_rate_never_waits() {
        let mut pace = Pace::new(None);
        let start = Instant::now();
        for _ in 0..1000 {
            pace.wait().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
