//! Several endpoints, one answer: asked one after another, the next one as soon as one fails or
//! keeps us waiting; the first answer wins. All of them failing gives one error that names each.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::Instant;

use crate::error::{EndpointFailure, Error, ErrorKind, Result};

/// How long an endpoint may keep a race waiting before the next one is asked too.
pub(crate) const STAGGER: Duration = Duration::from_millis(300);

/// Asks the endpoints in their order and gives the first answer, with the endpoint that gave it.
pub(crate) async fn race<E, T, F>(
    endpoints: Vec<E>,
    stagger: Duration,
    deadline: Instant,
    ask: impl Fn(E) -> F,
) -> Result<T>
where
    E: Display + Clone,
    F: Future<Output = Result<T>>,
{
    let mut failures = Failures::default();
    let mut waiting = endpoints.into_iter();
    let mut asked = FuturesUnordered::new();
    let mut silent: Vec<String> = Vec::new();
    loop {
        if let Some(endpoint) = waiting.next() {
            let name = endpoint.to_string();
            let answer = ask(endpoint);
            silent.push(name.clone());
            asked.push(async move { (name, answer.await) });
        }
        if asked.is_empty() {
            return Err(failures.into_error());
        }
        let patience = match waiting.len() {
            0 => deadline,
            _ => (Instant::now() + stagger).min(deadline),
        };
        match tokio::time::timeout_at(patience, asked.next()).await {
            Ok(Some((_, Ok(answer)))) => return Ok(answer),
            Ok(Some((name, Err(error)))) => {
                silent.retain(|other| *other != name);
                failures.add(name, &error);
            }
            Ok(None) => return Err(failures.into_error()),
            Err(_) if patience >= deadline => {
                for endpoint in silent {
                    let silence = Error::new(ErrorKind::Timeout, "no answer in time");
                    failures.add(endpoint, &silence);
                }
                return Err(failures.into_error());
            }
            Err(_) => {}
        }
    }
}

/// The causes so far.
#[derive(Default)]
struct Failures {
    /// Of the failure that says most.
    kind: Option<ErrorKind>,
    list: Vec<EndpointFailure>,
}

impl Failures {
    fn add(&mut self, endpoint: String, error: &Error) {
        let weight = |kind: ErrorKind| match kind {
            ErrorKind::Unreachable => 0,
            // A broker that is there but not ready says more than one that is not there.
            ErrorKind::NotReady => 2,
            _ => 1,
        };
        if self
            .kind
            .is_none_or(|kind| weight(error.kind()) > weight(kind))
        {
            self.kind = Some(error.kind());
        }
        if error.endpoints().is_empty() {
            let cause = error.message().to_owned();
            self.list.push(EndpointFailure { endpoint, cause });
        } else {
            // It has been told apart further already: a name with several addresses.
            self.list.extend(error.endpoints().iter().cloned());
        }
    }

    fn into_error(self) -> Error {
        let kind = self.kind.unwrap_or(ErrorKind::Unreachable);
        let message = match kind {
            ErrorKind::NotReady => "no broker is ready",
            ErrorKind::WrongCluster => "the brokers belong to another cluster",
            _ => "no broker could be reached",
        };
        Error::new(kind, message).with_endpoints(self.list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable(cause: &str) -> Error {
        Error::new(ErrorKind::Unreachable, cause)
    }

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[tokio::test(start_paused = true)]
    async fn race_goes_to_the_next_endpoint_at_once_on_failure_and_after_a_while_on_silence() {
        let began = Instant::now();
        let ask = |endpoint: &'static str| async move {
            match endpoint {
                "refused" => Err(unreachable("refused")),
                "silent" => std::future::pending().await,
                _ => Ok(endpoint),
            }
        };
        let answer = race(vec!["refused", "silent", "good"], STAGGER, deadline(), ask).await;
        assert_eq!(answer.unwrap(), "good");
        assert_eq!(began.elapsed(), STAGGER);
    }

    #[tokio::test(start_paused = true)]
    async fn race_lost_names_the_cause_of_each_endpoint_and_ends_by_its_deadline() {
        let began = Instant::now();
        let ask = |endpoint: &'static str| async move {
            match endpoint {
                "refused" => Err::<(), _>(unreachable("refused")),
                "forming" => Err(Error::new(ErrorKind::NotReady, "forming")),
                _ => std::future::pending().await,
            }
        };
        let error = race(
            vec!["silent", "refused", "forming"],
            STAGGER,
            deadline(),
            ask,
        )
        .await
        .unwrap_err();
        let causes: Vec<_> = error
            .endpoints()
            .iter()
            .map(|failure| (failure.endpoint.as_str(), failure.cause.as_str()))
            .collect();
        assert_eq!(
            causes,
            [
                ("refused", "refused"),
                ("forming", "forming"),
                ("silent", "no answer in time")
            ]
        );
        assert_eq!(error.kind(), ErrorKind::NotReady);
        assert_eq!(began.elapsed(), Duration::from_secs(5));
    }
}
