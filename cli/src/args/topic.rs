//! `qute topic ...` as `clap` reads it.

use clap::Subcommand;

use crate::text::key_value;

/// `qute topic ...`
#[derive(Debug, Subcommand)]
pub enum Topic {
    /// Create a topic; returns when every partition has a leader
    Create {
        /// Name of the topic: 1 to 249 of A-Z a-z 0-9 . _ -
        name: String,
        /// Partitions (default 6)
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        partitions: Option<u32>,
        /// Replicas of each partition, an odd number (default: three once there are three brokers, else one)
        #[arg(long, value_name = "N", value_parser = odd)]
        replicas: Option<u32>,
        /// A setting, such as retention_ms=86400000; may be repeated
        #[arg(long, value_name = "K=V", value_parser = key_value::parse)]
        config: Vec<(String, String)>,
    },
    /// List the topics
    List {
        /// List the cluster's own topics, too
        #[arg(long)]
        internal: bool,
    },
    /// Change settings of a topic; those that are not named stay
    Alter {
        /// Name of the topic
        name: String,
        /// A setting, such as retention_ms=7d; may be repeated
        #[arg(long, value_name = "K=V", value_parser = key_value::parse, required_unless_present = "unset")]
        set: Vec<(String, String)>,
        /// A setting that goes back to its default; may be repeated
        #[arg(long, value_name = "K")]
        unset: Vec<String>,
    },
    /// Show the settings of a topic and where they come from, or set some
    Config {
        /// Name of the topic
        name: String,
        /// K shows only this setting, K=V sets it
        #[arg(value_name = "K[=V]")]
        settings: Vec<String>,
    },
    /// Show the partitions of a topic: leaders, offsets, replicas
    Describe {
        /// Name of the topic
        name: String,
    },
    /// Raise the number of a topic's partitions; keys move, and the number is never lowered
    AddPartitions {
        /// Name of the topic
        name: String,
        /// How many partitions the topic has afterwards
        #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        partitions: u32,
    },
    /// Delete a topic with all its records
    Delete {
        /// Name of the topic
        name: String,
    },
}

pub(super) fn odd(text: &str) -> Result<u32, String> {
    let number: u32 = text
        .parse()
        .map_err(|_| "write an odd number: 1, 3, 5".to_owned())?;
    if number.is_multiple_of(2) {
        return Err("an even number of replicas survives no more losses than one fewer; write an odd number: 1, 3, 5".to_owned());
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use crate::args::tests::assert_usage_errors;

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["topic", "create", "t", "--partitions", "0"],
            &["topic", "create", "t", "--replicas", "2"],
            &["topic", "create", "t", "--config", "x"],
            &["topic", "alter", "t"],
            &["topic", "alter", "t", "--set", "retention_ms"],
        ]);
    }
}
