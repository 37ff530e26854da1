//! Connections: one per broker address and lane, with deadlines for everything.
//!
//! | file | holds |
//! | --- | --- |
//! | `connections.rs` | [`Connections`]: those that are open, what is known of each address |
//! | `dial.rs` | making one: names resolved anew, every address raced through TCP, HTTP/2 and `Hello` (S28) |
//! | `any.rs` | what any broker can answer: least loaded of two, rounds within the budget |
//! | `race.rs` | several endpoints, the first answer; one error that names each cause |
//! | `breaker.rs` | per address: after failures in a row calls fail at once until a probe succeeds (pure) |
//! | `budget.rs` | per client: how many retries the successes pay for (pure) |
//! | `backoff.rs` | how long to wait: exponential, full jitter, a floor (pure) |
//! | `load.rs` | per address: how busy it is (pure) |
//! | `limits.rs` | what the brokers accept, as they told |
//! | `route.rs` | per partition of a producer: to the leader, or waiting (pure) |

mod any;
mod backoff;
mod breaker;
mod budget;
mod connections;
mod dial;
mod limits;
mod load;
mod race;
mod route;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::groups_client::GroupsClient;
use qute_proto::v1::log_client::LogClient;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::error::{EndpointFailure, Error, cause_of};
pub(crate) use any::{Patience, Question, ask_any};
pub(crate) use backoff::Backoff;
pub(crate) use breaker::Failure;
pub(crate) use budget::Budget;
pub(crate) use connections::{CallError, Connections};
pub(crate) use dial::{Connection, Resolver, system_resolver};
pub(crate) use race::{STAGGER, race};
pub(crate) use route::{Next, Retry, Route};

/// The largest message taken from a broker.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// `host:port`.
pub(crate) type Address = Arc<str>;

/// What a connection is for: bulk traffic of one kind never queues behind that of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    Control,
    Produce,
    Fetch,
}

pub(crate) fn cluster_client(channel: Channel) -> ClusterClient<Channel> {
    ClusterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

pub(crate) fn log_client(channel: Channel) -> LogClient<Channel> {
    LogClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

pub(crate) fn groups_client(channel: Channel) -> GroupsClient<Channel> {
    GroupsClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

/// The connection was never made, so the request can't have reached the broker.
pub(crate) fn never_sent(status: &tonic::Status) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// An error of a call to `address`.
pub(crate) fn call_error(address: &Address, status: &tonic::Status) -> Error {
    Error::status(status).with_endpoints(vec![EndpointFailure {
        endpoint: address.to_string(),
        cause: cause_of(status),
    }])
}

/// Waits for a moment, if there is one.
pub(crate) async fn until(timer: Option<Instant>) {
    if let Some(timer) = timer {
        tokio::time::sleep_until(timer).await;
    }
}
