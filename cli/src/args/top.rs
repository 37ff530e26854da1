//! `qute top` as `clap` reads it.

use std::time::Duration;

use clap::Args;

use crate::text::duration;

/// `qute top`
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Keys: q ends, tab goes to the next list, s sorts it by the next column, r turns the order \
                        round, arrows and page keys scroll.\n\
                        Rates come from how far high watermarks and committed offsets have moved between two \
                        looks. Where standard output is no terminal, and with --output json, jsonl or raw, one \
                        picture is printed, after two looks."
)]
pub struct Top {
    /// Print one picture and end
    #[arg(long)]
    pub once: bool,

    /// How long from one look at the cluster to the next
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text)?;
    if interval < Duration::from_millis(100) {
        return Err("brokers are asked every 100ms at most".to_owned());
    }
    Ok(interval)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::{assert_usage_errors, parse};

    #[test]
    fn top_looks_once_a_second_by_default() {
        let Command::Top(top) = parse(&["top"]).unwrap().command else {
            panic!("another command");
        };
        assert_eq!((top.once, top.interval), (false, Duration::from_secs(1)));
    }

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["top", "--interval", "1"],
            &["top", "--interval", "0s"],
            &["top", "--interval", "99ms"],
            &["top", "orders"],
        ]);
    }
}
