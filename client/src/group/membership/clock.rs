//! What is due: the deadline of the session, heartbeats, doubts about the coordinator, the processing
//! limit.

use std::time::Duration;

use qute_proto::v1;
use qute_proto::v1::session_request::Request;
use tokio::time::Instant;

use super::claims::Claim;
use super::{Command, Life, LostReason, Membership, Stream, Told};
use crate::error::{Error, ErrorKind};

/// Heartbeats go at this part of the session timeout, and no more seldom than [`HEARTBEAT_MAX`].
const HEARTBEATS_PER_TIMEOUT: u32 = 3;
const HEARTBEAT_MAX: Duration = Duration::from_secs(3);
/// A coordinator that acknowledges nothing for this part of the session timeout is left for whoever
/// may have taken its place.
const DOUBTS_PER_TIMEOUT: u32 = 2;
/// A join may wait for the old session of its stable name for that one's timeout; longer than this in
/// addition, and the coordinator is looked for anew.
const JOIN_PATIENCE: Duration = Duration::from_secs(30);
/// A program that is waiting for the next event proves it within this.
pub(super) const PROBE_GRACE: Duration = Duration::from_secs(1);
impl Membership {
    /// Does what is due. Every input does this first.
    pub(in crate::group) fn advance(&mut self, now: Instant) {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.lose_session();
            self.close_in_doubt();
        }
        self.limit_processing(now);
        self.expire_revokes(now);
        if let Some(stream) = &self.stream
            && self.doubted_at(stream) <= now
        {
            self.close_in_doubt();
        }
        self.send_heartbeat(now);
        self.settle();
    }

    /// S26: the coordinator may have given everything to others.
    pub(super) fn lose_session(&mut self) {
        self.lose(|_, _| true, LostReason::SessionExpired);
        self.deadline = None;
        if let Life::Leaving { .. } = self.life {
            self.failure = Some(Error::new(
                ErrorKind::UnknownMember,
                "the session was over before the member had left: what was not committed is read again",
            ));
            self.end_leaving();
        } else {
            self.begin_epoch();
        }
    }

    pub(super) fn begin_epoch(&mut self) {
        self.epoch += 1;
        self.epoch_sent = false;
        self.deadline = None;
        self.floor.1 = 0;
    }

    pub(super) fn heartbeat_interval(&self) -> Duration {
        (self.session_timeout / HEARTBEATS_PER_TIMEOUT).min(HEARTBEAT_MAX)
    }

    pub(super) fn send_heartbeat(&mut self, now: Instant) {
        let interval = self.heartbeat_interval();
        let Some(stream) = &mut self.stream else {
            return;
        };
        if stream.coordinator_epoch.is_none() || now < stream.next_heartbeat {
            return;
        }
        stream.last_sequence += 1;
        stream.heartbeats.push_back((stream.last_sequence, now));
        stream.next_heartbeat = now + interval;
        let sequence = stream.last_sequence;
        self.send(Request::Heartbeat(v1::Heartbeat { sequence }));
    }

    /// When the coordinator at the other end is given up.
    pub(super) fn doubted_at(&self, stream: &Stream) -> Instant {
        match (stream.coordinator_epoch, stream.heartbeats.front()) {
            (Some(_), Some((_, sent))) => *sent + self.session_timeout / DOUBTS_PER_TIMEOUT,
            (Some(_), None) => stream.next_heartbeat + self.session_timeout,
            (None, _) if self.deadline.is_some() => {
                stream.opened_at + self.session_timeout / DOUBTS_PER_TIMEOUT
            }
            (None, _) => stream.opened_at + self.session_timeout + JOIN_PATIENCE,
        }
    }

    pub(super) fn limited_at(&self) -> Option<Instant> {
        let limit = self.settings.processing_limit?;
        if self.life != Life::Running || !self.claims.values().any(Claim::is_busy) {
            return None;
        }
        let since = match self.probed_at {
            Some(probed_at) => probed_at + PROBE_GRACE,
            None => self.active_at + limit,
        };
        Some(since)
    }

    /// The processing limit: the program has something in hand, and does nothing.
    pub(super) fn limit_processing(&mut self, now: Instant) {
        if self.limited_at().is_none_or(|at| now < at) {
            return;
        }
        if self.probed_at.is_none() {
            self.probed_at = Some(now);
            return self.commands.push_back(Command::Probe);
        }
        let limit = self.settings.processing_limit.unwrap_or_default();
        self.send_leave(false);
        self.lose(|_, _| true, LostReason::ProcessingLimit);
        self.told.push_back(Told::Failed(Error::new(
            ErrorKind::ProcessingLimit,
            format!(
                "the program held a batch for more than {limit:?} without asking for more or \
                 acknowledging any, and has left the group: it joins again when it asks for the next event",
            ),
        )));
        self.life = Life::Suspended;
        self.deadline = None;
        if self
            .stream
            .as_ref()
            .is_some_and(|stream| stream.coordinator_epoch.is_none())
        {
            self.close();
        }
    }
}
