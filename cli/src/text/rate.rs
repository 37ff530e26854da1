//! Rates: a number of records a second, `100` or `0.5`.

/// Records a second: finite and above zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(f64);

/// Below, the first wait is longer than anybody waits; above, a record has no nanosecond of its own.
const BOUNDS: std::ops::RangeInclusive<f64> = 1e-6..=1e9;

impl Rate {
    /// Records a second.
    #[must_use]
    pub fn per_second(self) -> f64 {
        self.0
    }
}

/// Reads a rate.
///
/// # Errors
/// No number, or not within a record in a million seconds and 10^9 records a second.
pub fn parse(text: &str) -> Result<Rate, String> {
    let rate: f64 = text
        .trim()
        .parse()
        .map_err(|_| "write a number of records a second, such as 100 or 0.5".to_owned())?;
    if !rate.is_finite() || rate <= 0.0 {
        return Err("a rate is above 0".to_owned());
    }
    if !BOUNDS.contains(&rate) {
        return Err("a rate is between 0.000001 and 1000000000 records a second".to_owned());
    }
    Ok(Rate(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_numbers_above_zero_gives_their_rate() {
        assert_eq!(parse("100").map(Rate::per_second), Ok(100.0));
        assert_eq!(parse("0.5").map(Rate::per_second), Ok(0.5));
        assert_eq!(parse("1e3").map(Rate::per_second), Ok(1000.0));
    }

    #[test]
    fn parse_of_anything_else_is_refused() {
        for wrong in [
            "", "fast", "10/s", "0", "-0", "-1", "nan", "inf", "1e-9", "1e10",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
