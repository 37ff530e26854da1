//! `qute context ...` as `clap` reads it.

use clap::Subcommand;
use qute_client::Bootstrap;

use crate::contexts::check_name;

/// `qute context ...`
#[derive(Debug, Subcommand)]
#[command(
    after_help = "The cluster that a command talks to is named by -b, else --context, else QUTE_BOOTSTRAP, \
                        else QUTE_CONTEXT, else the context in use; else it is 127.0.0.1:7700.\n\
                        The contexts are in the file $QUTE_CONFIG, else qute/contexts.toml in $XDG_CONFIG_HOME \
                        (~/.config)."
)]
pub enum Context {
    /// Save the brokers of a cluster under a name; the first one saved is in use at once
    Add {
        /// Name of the context: 1 to 64 of A-Z a-z 0-9 . _ -
        #[arg(value_parser = check_name)]
        name: String,
        /// Brokers of the cluster; any one of them is enough
        #[arg(value_name = "HOST:PORT,..")]
        brokers: Bootstrap,
        /// Take it into use
        #[arg(long = "use")]
        take_into_use: bool,
        /// If there is one of that name, put the new brokers in their place
        #[arg(long)]
        replace: bool,
    },
    /// Take a saved cluster into use: commands talk to it unless told otherwise
    Use {
        /// Name of the context
        #[arg(required_unless_present = "none", conflicts_with = "none")]
        name: Option<String>,
        /// Use none of them
        #[arg(long)]
        none: bool,
    },
    /// List the saved clusters
    List,
    /// Show which brokers commands talk to, and who said so
    Show {
        /// Show this context instead of the one in use
        name: Option<String>,
    },
    /// Forget a saved cluster; nothing happens to the cluster itself
    Remove {
        /// Name of the context
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use crate::args::tests::assert_usage_errors;

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["context"],
            &["context", "add"],
            &["context", "add", "prod"],
            &["context", "add", "a b", "h:1"],
            &["context", "add", "prod", "h:x"],
            &["context", "use"],
            &["context", "use", "prod", "--none"],
            &["context", "remove"],
        ]);
    }
}
