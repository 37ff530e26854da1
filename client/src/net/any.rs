//! Calls that any broker can serve (metadata, the state of the cluster): the least loaded of two,
//! the next one when it fails or is slow, and rounds over all of them within the retry budget.
//!
//! ```text
//!  question --> Retry (tower: a pause with full jitter, charged to the budget)
//!                 '--> Round: each endpoint once at most, least loaded of two first (`race.rs`)
//!                        '--> Connections::call: deadline, breaker, load
//! ```
//!
//! A call that loses the race is dropped; the load of its broker hears how long it had taken by then.
//!
//! The stack is tower's `Service` and `Retry`. Not used:
//! - tower's `balance::p2c`: it waits for ever when no endpoint is ready, can't leave out those that
//!   have failed within the same question, and tells no cause per endpoint;
//! - tower's `timeout`: the limit of an answer is kept by [`Connections::call`], which tells a
//!   connection that was lost from an answer that is late, and names the endpoint;
//! - tower's `hedge`: it needs a history of latencies, and metadata is asked for rarely.
//!
//! Calls that only a leader can serve never come here: they go straight to it.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use rand::{Rng, RngExt};
use tokio::time::Instant;
use tower::retry::{Policy, RetryLayer};
use tower::{Service, ServiceBuilder, ServiceExt};

use super::{Address, Backoff, Connections, STAGGER, race};
use crate::config::ClientConfig;
use crate::error::{Error, ErrorKind, Result};

/// How one broker is asked.
type Ask<'a, T> = &'a (dyn Fn(Address) -> BoxFuture<'a, Result<T>> + Send + Sync);
/// The endpoints by preference: no class is asked before the one in front of it.
type Endpoints<'a> = &'a (dyn Fn() -> Vec<Vec<Address>> + Send + Sync);

/// Something that any broker can answer.
pub(crate) struct Question<'a, T> {
    /// Looked up anew for each round.
    pub(crate) endpoints: Endpoints<'a>,
    pub(crate) ask: Ask<'a, T>,
    pub(crate) deadline: Instant,
    pub(crate) patience: Patience,
}

/// What is worth another round before the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Nothing.
    None,
    /// Brokers that are not ready yet: a cluster that is forming. Nobody there is told at once.
    Forming,
    /// Whatever may pass: there has been a cluster, and it will be back.
    Outage,
}

impl Patience {
    fn bears(self, error: &Error) -> bool {
        match self {
            Self::None => false,
            Self::Forming => error.kind() == ErrorKind::NotReady,
            Self::Outage => error.is_retriable(),
        }
    }
}

impl<T> Clone for Question<'_, T> {
    fn clone(&self) -> Self {
        Self { ..*self }
    }
}

/// Asks until a broker has answered.
///
/// # Errors
/// With the cause for each endpoint of the last round.
pub(crate) async fn ask_any<'a, T: 'a>(
    config: &ClientConfig,
    connections: &Connections,
    question: Question<'a, T>,
) -> Result<T> {
    let rounds = Rounds {
        connections: connections.clone(),
        backoff: Backoff::new(config),
    };
    let stack = ServiceBuilder::new()
        .layer(RetryLayer::new(rounds))
        .service(Round {
            connections: connections.clone(),
        });
    stack.oneshot(question).await
}

/// One round over the endpoints.
#[derive(Clone)]
struct Round {
    connections: Connections,
}

impl<'a, T: 'a> Service<Question<'a, T>> for Round {
    type Response = T;
    type Error = Error;
    type Future = BoxFuture<'a, Result<T>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, question: Question<'a, T>) -> Self::Future {
        let load = |address: &Address| self.connections.load(address);
        let order = least_loaded_of_two((question.endpoints)(), load, &mut rand::rng());
        Box::pin(race(order, STAGGER, question.deadline, question.ask))
    }
}

/// Of two drawn from what is left of a class the less loaded comes next: as good as the least loaded
/// of all where many clients choose by what each of them sees, and without the herd. Both draws may
/// be the same one, so that even of two the slower one comes first at times: the fastest may be the
/// one with the old view.
fn least_loaded_of_two(
    classes: Vec<Vec<Address>>,
    load: impl Fn(&Address) -> f64,
    rng: &mut impl Rng,
) -> Vec<Address> {
    let mut order = Vec::new();
    for mut class in classes {
        while class.len() > 1 {
            let first = rng.random_range(0..class.len());
            let second = rng.random_range(0..class.len());
            let cost = |at: usize| class.get(at).map_or(f64::INFINITY, &load);
            let chosen = if cost(second) < cost(first) {
                second
            } else {
                first
            };
            order.push(class.swap_remove(chosen));
        }
        order.append(&mut class);
    }
    order
}

/// When to begin another round.
#[derive(Clone)]
struct Rounds {
    connections: Connections,
    backoff: Backoff,
}

impl<'a, T> Policy<Question<'a, T>, T, Error> for Rounds {
    type Future = tokio::time::Sleep;

    fn retry(
        &mut self,
        question: &mut Question<'a, T>,
        result: &mut Result<T>,
    ) -> Option<Self::Future> {
        let error = result.as_ref().err()?;
        if !question.patience.bears(error) {
            return None;
        }
        let now = Instant::now();
        let until = now + self.backoff.step_within(self.connections.budget(), now);
        (until < question.deadline).then(|| tokio::time::sleep_until(until))
    }

    fn clone_request(&mut self, question: &Question<'a, T>) -> Option<Question<'a, T>> {
        Some(question.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use rand::SeedableRng;

    use super::*;
    use crate::stats::Stats;

    fn addresses(names: &[&str]) -> Vec<Address> {
        names.iter().map(|&name| name.into()).collect()
    }

    fn connections() -> (Arc<ClientConfig>, Connections) {
        let config = Arc::new(ClientConfig::new("a:1").unwrap());
        let connections = Connections::new(Arc::clone(&config), Arc::new(Stats::default()));
        (config, connections)
    }

    #[test]
    fn least_loaded_of_two_prefers_the_idle_starves_nobody_and_keeps_classes_apart() {
        let load = |address: &Address| match &**address {
            "busy" => 9.0,
            _ => 1.0,
        };
        let mut firsts = std::collections::BTreeMap::new();
        for seed in 0..900 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let classes = vec![addresses(&["busy", "a", "b"]), addresses(&["last"])];
            let order = least_loaded_of_two(classes, load, &mut rng);
            assert_eq!(&*order[3], "last", "seed {seed}");
            *firsts.entry(order[0].to_string()).or_insert(0) += 1;
        }
        // A ninth: both draws.
        assert!((50..150).contains(&firsts["busy"]), "{firsts:?}");
        assert!(firsts["a"] > 300 && firsts["b"] > 300, "{firsts:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn any_broker_not_ready_is_asked_again_until_the_deadline_and_in_the_budget() {
        let (config, connections) = connections();
        let asked = AtomicU32::new(0);
        let ask = |_| -> BoxFuture<'_, Result<()>> {
            asked.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Err(Error::new(ErrorKind::NotReady, "forming")) })
        };
        let endpoints = || vec![addresses(&["a:1"])];
        let began = Instant::now();
        let question = Question {
            endpoints: &endpoints,
            ask: &ask,
            deadline: began + Duration::from_secs(60),
            patience: Patience::Forming,
        };
        let error = ask_any(&config, &connections, question).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotReady);
        assert!(began.elapsed() > Duration::from_secs(55));
        let asked = asked.load(Ordering::Relaxed);
        assert!((20..=100 + 60 * 10).contains(&asked), "{asked}");
    }

    #[tokio::test(start_paused = true)]
    async fn any_broker_unreachable_is_told_at_once() {
        let (config, connections) = connections();
        let ask = |_| -> BoxFuture<'_, Result<()>> {
            Box::pin(async { Err(Error::new(ErrorKind::Unreachable, "refused")) })
        };
        let endpoints = || vec![addresses(&["a:1", "b:1"])];
        let began = Instant::now();
        let question = Question {
            endpoints: &endpoints,
            ask: &ask,
            deadline: began + Duration::from_secs(60),
            patience: Patience::Forming,
        };
        let error = ask_any(&config, &connections, question).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.endpoints().len()),
            (ErrorKind::Unreachable, 2)
        );
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn any_broker_unreachable_in_an_outage_is_asked_again_until_the_deadline() {
        let (config, connections) = connections();
        let began = Instant::now();
        let back = began + Duration::from_secs(20);
        let ask = |_| -> BoxFuture<'_, Result<()>> {
            Box::pin(async move {
                if Instant::now() < back {
                    return Err(Error::new(ErrorKind::Unreachable, "refused"));
                }
                Ok(())
            })
        };
        let endpoints = || vec![addresses(&["a:1", "b:1"])];
        let question = |limit: u64| Question {
            endpoints: &endpoints,
            ask: &ask,
            deadline: began + Duration::from_secs(limit),
            patience: Patience::Outage,
        };
        let early = ask_any(&config, &connections, question(10)).await;
        assert_eq!(early.unwrap_err().kind(), ErrorKind::Unreachable);
        assert!(began.elapsed() > Duration::from_secs(5));
        ask_any(&config, &connections, question(60)).await.unwrap();
    }
}
