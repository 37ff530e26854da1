//! Which record is due when, and the stamp that says so at the front of its value.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::time::Instant;

use crate::{Control, Load};

/// Bytes at the front of each value: which run it belongs to, and when it was due in nanoseconds
/// since the run's start, eight bytes each.
pub const STAMP_BYTES: usize = 16;

/// Hands out record numbers with the times at which they are due.
#[derive(Debug)]
pub struct Schedule {
    /// Tells the records of this run from whatever else the topic holds.
    run: u64,
    start: Instant,
    next: AtomicU64,
    records_max: u64,
    end: Option<Instant>,
    rate: Option<f64>,
    control: Control,
}

impl Schedule {
    /// Starts now.
    #[must_use]
    pub fn new(load: &Load, control: Control) -> Self {
        let start = Instant::now();
        Self {
            // Seeded by the system.
            run: RandomState::new().build_hasher().finish(),
            start,
            next: AtomicU64::new(0),
            records_max: load.records_max(),
            end: load.duration.map(|duration| start + duration),
            rate: load.rate,
            control,
        }
    }

    /// The next record and when it is due; `None`: enough.
    pub async fn next(&self) -> Option<(u64, Instant)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.records_max || self.control.is_stopped() {
            return None;
        }
        let due = match self.rate {
            None => Instant::now(),
            #[allow(clippy::cast_precision_loss)]
            Some(rate) => {
                let after = Duration::try_from_secs_f64(number as f64 / rate).ok()?;
                self.start.checked_add(after)?
            }
        };
        // Before the rest, not after it: at one record a second that of the last sender is long.
        if self.end.is_some_and(|end| due >= end) {
            return None;
        }
        if self.rate.is_some() {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(due) => {}
                () = self.control.stopped() => return None,
            }
        }
        Some((number, due))
    }

    /// A value of `STAMP_BYTES` and the filler.
    pub(crate) fn value(&self, due: Instant, filler: &Bytes) -> Bytes {
        let mut value = BytesMut::with_capacity(STAMP_BYTES + filler.len());
        value.put_u64_le(self.run);
        let after = due.saturating_duration_since(self.start).as_nanos();
        value.put_u64_le(u64::try_from(after).unwrap_or(u64::MAX));
        value.extend_from_slice(filler);
        value.freeze()
    }

    /// When the record with this value was due; `None` if it is none of this run.
    pub(crate) fn due(&self, value: &[u8]) -> Option<Instant> {
        let (run, rest) = value.split_first_chunk::<8>()?;
        let (after, _) = rest.split_first_chunk::<8>()?;
        if u64::from_le_bytes(*run) != self.run {
            return None;
        }
        self.start
            .checked_add(Duration::from_nanos(u64::from_le_bytes(*after)))
    }
}

/// Bytes that don't compress well, the same for every record.
#[must_use]
pub(crate) fn filler(length: usize) -> Bytes {
    let mut state = 1_u64;
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    };
    (0..length).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load::new("t")
    }

    #[tokio::test(start_paused = true)]
    async fn schedule_with_a_rate_gives_records_as_they_fall_due() {
        let load = Load {
            rate: Some(100.0),
            records: Some(3),
            ..load()
        };
        let schedule = Schedule::new(&load, Control::new());
        let mut due = Vec::new();
        while let Some((number, at)) = schedule.next().await {
            assert!(Instant::now() >= at);
            due.push((number, (at - schedule.start).as_millis()));
        }
        assert_eq!(due, [(0, 0), (1, 10), (2, 20)]);
    }

    #[tokio::test(start_paused = true)]
    async fn schedule_with_a_duration_ends_before_what_is_due_later() {
        let load = Load {
            rate: Some(2.0),
            duration: Some(Duration::from_secs(1)),
            ..load()
        };
        let schedule = Schedule::new(&load, Control::new());
        let mut numbers = 0;
        while schedule.next().await.is_some() {
            numbers += 1;
        }
        assert_eq!(numbers, 2);
        assert_eq!(schedule.start.elapsed(), Duration::from_millis(500));
    }

    #[tokio::test(start_paused = true)]
    async fn schedule_that_is_stopped_ends_while_it_waits() {
        let load = Load {
            rate: Some(0.001),
            ..load()
        };
        let control = Control::new();
        let schedule = Schedule::new(&load, control.clone());
        assert!(schedule.next().await.is_some());
        let (next, ()) = tokio::join!(schedule.next(), async { control.stop() });
        assert_eq!(next, None);
        assert_eq!(schedule.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn stamp_of_another_run_is_no_record_of_this_one() {
        let (one, other) = (
            Schedule::new(&load(), Control::new()),
            Schedule::new(&load(), Control::new()),
        );
        let due = one.start + Duration::from_millis(3);
        let value = one.value(due, &filler(5));
        assert_eq!(value.len(), STAMP_BYTES + 5);
        assert_eq!(one.due(&value), Some(due));
        assert_eq!(other.due(&value), None);
        assert_eq!(one.due(b"short"), None);
    }

    #[test]
    fn records_max_counts_the_warm_up() {
        let with = |records, duration| {
            let load = Load {
                records,
                duration,
                warmup: 5,
                ..load()
            };
            load.records_max()
        };
        assert_eq!(with(Some(10), None), 15);
        assert_eq!(with(Some(10), Some(Duration::from_secs(1))), 15);
        assert_eq!(with(None, Some(Duration::from_secs(1))), u64::MAX);
        assert_eq!(with(None, None), 1_000_005);
    }
}
