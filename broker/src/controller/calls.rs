//! Unary calls to other brokers (`internal.v1.Peer`), each with a deadline.
//!
//! One channel per address, made when first needed and dropped when a call over it fails for
//! want of a connection, so that names are resolved anew.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::internal::peer_client::PeerClient;
use qute_proto::internal::{
    FoundRequest, FoundResponse, JoinRequest, JoinResponse, ProbeRequest, ProbeResponse,
    PromiseRequest, PromiseResponse, ProposeRequest, ProposeResponse,
};
use tonic::transport::{Channel, Endpoint};

/// Until a TCP connection stands.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Largest answer that is read.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Channels kept at most; past that all are made anew.
const CHANNELS_MAX: usize = 256;

/// A call that got no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    /// Not something to connect to.
    #[error("`{0}` is not an address")]
    Address(String),
    /// No answer within the deadline.
    #[error("no answer from {address} within {} ms", .deadline.as_millis())]
    Deadline {
        /// Who was asked.
        address: String,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// Could not connect, or the call was refused as a whole.
    #[error("{address}: {message}")]
    Failed {
        /// Who was asked.
        address: String,
        /// What tonic says.
        message: String,
    },
}

/// Makes the calls. Shared by all of the controller.
#[derive(Debug, Default)]
pub struct Calls {
    // Short: look-ups only, never across an await.
    channels: Mutex<HashMap<String, Channel>>,
}

macro_rules! call {
    ($(#[$doc:meta])* $name:ident, $request:ty, $response:ty) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// No answer within the deadline.
        pub async fn $name(
            &self,
            address: &str,
            request: $request,
            deadline: Duration,
        ) -> Result<$response, CallError> {
            let mut client = self.client(address)?;
            let outcome = tokio::time::timeout(deadline, client.$name(request)).await;
            self.answer(address, deadline, outcome)
        }
    };
}

impl Calls {
    call!(/// Asks a broker what it is.
        probe, ProbeRequest, ProbeResponse);
    call!(/// Asks a broker for its promise.
        promise, PromiseRequest, PromiseResponse);
    call!(/// Tells a broker that its founding set is complete.
        found, FoundRequest, FoundResponse);
    call!(/// Asks the leader of `__cluster` to be let in.
        join, JoinRequest, JoinResponse);
    call!(/// Hands a command to the leader of `__cluster`.
        propose, ProposeRequest, ProposeResponse);

    fn client(&self, address: &str) -> Result<PeerClient<Channel>, CallError> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(client(channel.clone()));
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| CallError::Address(address.to_owned()))?;
        let channel = endpoint
            .connect_timeout(CONNECT_DEADLINE)
            .tcp_nodelay(true)
            .connect_lazy();
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Ok(client(channel))
    }

    fn answer<T>(
        &self,
        address: &str,
        deadline: Duration,
        outcome: Result<Result<tonic::Response<T>, tonic::Status>, tokio::time::error::Elapsed>,
    ) -> Result<T, CallError> {
        let error = match outcome {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => CallError::Failed {
                address: address.to_owned(),
                message: describe(&status),
            },
            Err(_) => CallError::Deadline {
                address: address.to_owned(),
                deadline,
            },
        };
        self.channels.lock().remove(address);
        Err(error)
    }
}

fn client(channel: Channel) -> PeerClient<Channel> {
    PeerClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX)
}

/// The innermost cause says most ("connection refused").
fn describe(status: &tonic::Status) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unreachable_address_fails_within_the_deadline() {
        let calls = Calls::default();
        // Bound and dropped: nobody listens there.
        let address = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let outcome = calls
            .probe(
                &address.to_string(),
                ProbeRequest::default(),
                Duration::from_secs(5),
            )
            .await;
        assert!(
            matches!(outcome, Err(CallError::Failed { .. })),
            "{outcome:?}"
        );
        assert!(calls.channels.lock().is_empty());
    }

    #[tokio::test]
    async fn silent_address_runs_into_the_deadline() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let outcome = Calls::default()
            .probe(&address, ProbeRequest::default(), Duration::from_millis(50))
            .await;
        assert!(
            matches!(outcome, Err(CallError::Deadline { .. })),
            "{outcome:?}"
        );
    }

    #[tokio::test]
    async fn nonsense_is_no_address() {
        let outcome = Calls::default()
            .probe("a b", ProbeRequest::default(), Duration::from_secs(1))
            .await;
        assert!(matches!(outcome, Err(CallError::Address(_))), "{outcome:?}");
    }
}
