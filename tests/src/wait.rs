//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a condition is given before the test fails: long enough for a machine that runs
/// other tests at the same time.
pub const LONG: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(20);

/// Asks `check` again and again until it answers `Some`.
///
/// An error counts as "not yet"; the last one is part of the failure.
///
/// # Errors
/// When `within` has passed.
pub fn until<T>(
    what: &str,
    within: Duration,
    mut check: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        let last = match check() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if Instant::now() >= deadline {
            let waited = format!("waited {within:?} in vain for: {what}");
            return match last {
                Some(error) => Err(error).context(waited),
                None => bail!(waited),
            };
        }
        std::thread::park_timeout(PAUSE);
    }
}

/// [`until`] for a condition without a value.
///
/// # Errors
/// When `within` has passed.
pub fn until_true(
    what: &str,
    within: Duration,
    mut check: impl FnMut() -> Result<bool>,
) -> Result<()> {
    until(what, within, || Ok(check()?.then_some(())))
}

/// Lets the thread rest until `at`; for pacing a load, not for waiting on an effect.
pub fn rest_until(at: Instant) {
    while let Some(left) = at
        .checked_duration_since(Instant::now())
        .filter(|l| !l.is_zero())
    {
        std::thread::park_timeout(left);
    }
}
