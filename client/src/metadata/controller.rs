//! The way to the leader of `__cluster`, for calls that only it can serve.

use std::sync::Arc;

use qute_proto::v1;
use rand::seq::SliceRandom;
use tokio::time::Instant;
use tracing::debug;

use super::cache::MetadataCache;
use super::snapshot::{Leader, leader_of_hint};
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Backoff};
use crate::trace;

/// Finds the leader of `__cluster`: first the known one, then by hints, else one endpoint after
/// the other.
pub(crate) struct ControllerRoute<'a> {
    cache: &'a MetadataCache,
    hinted: Option<Address>,
    /// Hints obeyed in a row: each must carry a newer epoch.
    known: Option<Leader>,
    rest: Vec<Address>,
    backoff: Backoff,
    failure: Option<Error>,
    pause: bool,
    /// Every other attempt goes to the known leader, the rest around.
    turn: bool,
}

impl<'a> ControllerRoute<'a> {
    pub(crate) fn new(cache: &'a MetadataCache) -> Self {
        let view = cache.load();
        let hinted = view
            .controller
            .and_then(|leader| view.address(leader.broker).cloned());
        Self {
            cache,
            hinted,
            known: view.controller,
            rest: Vec::new(),
            backoff: Backoff::new(&cache.config),
            failure: None,
            pause: false,
            turn: true,
        }
    }

    /// Where to ask next.
    pub(crate) fn next(&mut self) -> Address {
        if let Some(address) = self.hinted.take() {
            return address;
        }
        self.turn = !self.turn;
        if self.turn
            && let Some(known) = self.known
            && let Some(address) = self.cache.load().address(known.broker)
        {
            return Arc::clone(address);
        }
        if self.rest.is_empty() {
            self.rest = self.cache.endpoints();
            self.rest.shuffle(&mut rand::rng());
        }
        // The bootstrap list is never empty.
        self.rest.pop().unwrap_or_else(|| Arc::from(""))
    }

    /// The endpoint failed or does not lead; its hint is obeyed if it is newer.
    pub(crate) fn refused(
        &mut self,
        address: &Address,
        error: Error,
        hint: Option<&v1::LeaderHint>,
    ) {
        debug!(target: trace::METADATA, %address, %error, "not answered by the leader of __cluster");
        let leader = hint.and_then(leader_of_hint);
        let newer =
            leader.filter(|leader| self.known.is_none_or(|known| known.epoch < leader.epoch));
        self.pause = newer.is_none();
        if hint.is_some() {
            self.cache.connections.stats.hinted(newer.is_some());
        }
        if let (Some(leader), Some(hint)) = (newer, hint) {
            self.known = Some(leader);
            let view = self.cache.load();
            self.hinted = view
                .address(leader.broker)
                .cloned()
                .or_else(|| (!hint.address.is_empty()).then(|| hint.address.as_str().into()));
        }
        self.failure = Some(error);
    }

    /// Backs off unless a newer hint is to be followed at once.
    ///
    /// # Errors
    /// The last failure, once the deadline has passed.
    pub(crate) async fn pause(&mut self, deadline: Instant) -> Result<()> {
        if !self.pause {
            return Ok(());
        }
        let now = Instant::now();
        let until = now
            + self
                .backoff
                .step_within(self.cache.connections.budget(), now);
        if until >= deadline {
            return Err(self.timed_out());
        }
        tokio::time::sleep_until(until).await;
        Ok(())
    }

    /// What to report when the deadline has passed.
    pub(crate) fn timed_out(&self) -> Error {
        let cause = self
            .failure
            .as_ref()
            .map(|failure| format!("; last: {failure}"));
        Error::new(
            ErrorKind::Timeout,
            format!(
                "the leader of __cluster did not answer in time{}",
                cause.unwrap_or_default()
            ),
        )
    }
}
