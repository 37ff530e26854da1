//! The tasks that keep the view fresh: one has it pushed by whichever broker serves, one refreshes
//! for those who do not wait themselves, and when nobody has confirmed the view for long.
//!
//! Failed calls have their metadata refreshed by themselves, so the watch only makes things faster;
//! a watch that is dead without knowing it is found out by the aged refresh, and by callers whose
//! broker keeps silent.

use std::sync::Arc;
use std::time::Duration;

use qute_proto::v1;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::cache::{ANSWER_TIMEOUT, MetadataCache};
use crate::config::ClientConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Backoff, Lane, call_error, cluster_client};
use crate::trace;

/// Starts the tasks; they end with the token.
pub(crate) fn spawn_upkeep(cache: Arc<MetadataCache>, stop: CancellationToken) {
    tokio::spawn(async move {
        let tasks = async { tokio::join!(watch(&cache), refresh(&cache)) };
        stop.run_until_cancelled(tasks).await;
    });
}

/// How soon a refresh may follow another: at once after a quiet time, else with a growing pause, so
/// that a storm of failures does not become one of refreshes. Pure.
#[derive(Debug)]
struct Cadence {
    backoff: Backoff,
    quiet: Duration,
    last: Option<Instant>,
}

impl Cadence {
    fn new(config: &ClientConfig) -> Self {
        Self {
            backoff: Backoff::new(config),
            quiet: config.backoff_max.saturating_mul(2),
            last: None,
        }
    }

    /// The pause before a refresh that is wanted at `now`, by a draw from `0.0..=1.0`.
    fn pause(&mut self, now: Instant, draw: f64) -> Duration {
        let since = self.last.map(|last| now.saturating_duration_since(last));
        let pause = if since.is_none_or(|since| since >= self.quiet) {
            self.backoff.reset();
            Duration::ZERO
        } else {
            self.backoff.step_drawn(draw)
        };
        self.last = Some(now + pause);
        pause
    }
}

/// When a view that was last confirmed at `heard` is too old: 80 to 100% of the age, so that
/// clients started together do not ask together.
fn aged_at(heard: Instant, max_age: Duration, draw: f64) -> Instant {
    heard + max_age.mul_f64(0.8 + draw.clamp(0.0, 1.0) / 5.0)
}

async fn refresh(cache: &MetadataCache) {
    let mut cadence = Cadence::new(&cache.config);
    let mut draw = rand::random();
    let mut tried = Instant::now();
    loop {
        // The broker that is asked may hear of the newest last: what is pushed counts, too.
        let aged = aged_at(
            tried.max(cache.heard_at()),
            cache.config.metadata_max_age,
            draw,
        );
        let wanted = tokio::select! {
            () = cache.refresh_wanted.notified() => true,
            () = tokio::time::sleep_until(aged) => false,
        };
        if !wanted && aged_at(cache.heard_at(), cache.config.metadata_max_age, draw) > aged {
            // Confirmed meanwhile.
            continue;
        }
        tokio::time::sleep(cadence.pause(Instant::now(), rand::random())).await;
        let before = cache.version();
        let refreshed = cache.refresh().await;
        if let Err(error) = &refreshed {
            debug!(target: trace::METADATA, %error, "metadata refresh failed");
        }
        if !wanted && cache.version() != before {
            // It should have been pushed long ago.
            cache.move_watch();
        }
        tried = Instant::now();
        draw = rand::random();
    }
}

async fn watch(cache: &MetadataCache) {
    let mut backoff = Backoff::new(&cache.config);
    loop {
        for address in cache.endpoints() {
            cache.watching(Some(&address));
            let watched = tokio::select! {
                watched = watch_one(cache, &address) => watched,
                () = cache.watch_doubted.notified() => Ok(0),
            };
            cache.watching(None);
            match watched {
                Ok(views) if views > 0 => backoff.reset(),
                Ok(_) => {}
                Err(error) => {
                    debug!(target: trace::METADATA, %address, %error, "metadata watch ended");
                }
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }
}

/// Follows one broker until its stream ends; gives how many views it sent.
async fn watch_one(cache: &MetadataCache, address: &Address) -> Result<u64> {
    let connection = cache.connections.ready(address, Lane::Control).await?;
    let mut client = cluster_client(connection.channel());
    let opening = client.watch_metadata(v1::WatchMetadataRequest {});
    let ended = |status: &tonic::Status| {
        cache.connections.broken(&connection, status);
        call_error(address, status)
    };
    let mut stream = timeout(ANSWER_TIMEOUT, opening)
        .await
        .map_err(|_| Error::new(ErrorKind::Timeout, "no answer in time"))?
        .map_err(|status| ended(&status))?
        .into_inner();
    let mut views = 0;
    while let Some(response) = stream.message().await.map_err(|status| ended(&status))? {
        cache.offer(&response)?;
        views += 1;
    }
    Ok(views)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cadence_of_a_storm_grows_to_the_longest_back_off_and_is_short_again_after_quiet() {
        let mut cadence = Cadence::new(&ClientConfig::new("a:1").unwrap());
        let start = Instant::now();
        let mut now = start;
        let mut refreshes = 0;
        assert_eq!(cadence.pause(now, 1.0), Duration::ZERO, "the first one");
        while now < start + Duration::from_secs(10) {
            // Wanted again as soon as the last one is done.
            now += cadence.pause(now, 0.5) + Duration::from_millis(1);
            refreshes += 1;
        }
        assert!(refreshes < 60, "{refreshes}");
        now += Duration::from_secs(1);
        assert_eq!(cadence.pause(now, 1.0), Duration::ZERO);
        assert_eq!(cadence.pause(now, 1.0), Duration::from_millis(20));
    }

    #[test]
    fn age_of_a_view_is_jittered_downwards() {
        let heard = Instant::now();
        let age = Duration::from_secs(100);
        assert_eq!(aged_at(heard, age, 0.0), heard + Duration::from_secs(80));
        assert_eq!(aged_at(heard, age, 1.0), heard + age);
    }
}
