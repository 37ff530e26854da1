//! What the program asks for: to be told more, to read other topics, to leave.

use std::collections::BTreeMap;

use qute_proto::ids::PartitionId;
use qute_proto::v1::session_request::Request;
use qute_proto::v1::{self, ErrorCode};
use tokio::time::Instant;

use super::{Asked, Command, Life, Membership, Stream, Told, is_of_the_coordinator};
use crate::error::{Error, ErrorKind};

impl Membership {
    /// The program asks for the next event.
    pub(in crate::group) fn polled(&mut self, now: Instant) {
        self.advance(now);
        self.touch(now);
        if self.life == Life::Suspended {
            self.close();
            self.begin_epoch();
            self.left_with.clear();
            self.life = Life::Running;
        }
    }

    pub(super) fn touch(&mut self, now: Instant) {
        self.active_at = now;
        self.probed_at = None;
    }

    /// What the member reads.
    pub(in crate::group) fn subscribe(&mut self, topics: Vec<v1::TopicSubscription>, now: Instant) {
        self.advance(now);
        if self.topics == topics {
            return;
        }
        self.topics = topics.clone();
        // Otherwise it goes with the next join; a stream that waits for its answer begins anew.
        match self.stream.as_ref().map(|stream| stream.coordinator_epoch) {
            Some(Some(_)) => {
                let correlation_id = self.ask(Asked::Topics);
                let topics = v1::session_request::Subscribed {
                    correlation_id,
                    topics,
                };
                self.send(Request::Topics(topics));
            }
            Some(None) => self.close(),
            None => {}
        }
    }

    /// The assignment that was asked for.
    pub(in crate::group) fn publish(
        &mut self,
        generation: u64,
        assignment: Vec<v1::MemberAssignment>,
        now: Instant,
    ) {
        self.advance(now);
        let computing = self.stream.as_ref().and_then(|stream| stream.computing);
        if computing != Some(generation) {
            return;
        }
        let correlation_id = self.ask(Asked::Publish(generation));
        self.send(Request::Publish(v1::Publish {
            correlation_id,
            generation,
            assignment,
        }));
    }

    /// There is none: whatever was asked to compute it failed.
    pub(in crate::group) fn not_computed(&mut self, generation: u64, error: Error) {
        self.not_assigned(generation, None, error);
    }

    /// The coordinator asks again, this member or another; once a generation the program hears of what
    /// does not pass by itself. `code`: what the coordinator said.
    pub(super) fn not_assigned(&mut self, generation: u64, code: Option<ErrorCode>, error: Error) {
        if let Some(stream) = &mut self.stream
            && stream.computing == Some(generation)
        {
            stream.computing = None;
        }
        let passes = code.is_some_and(is_of_the_coordinator) || generation < self.generation;
        if passes || self.not_assigned == Some(generation) {
            return;
        }
        self.not_assigned = Some(generation);
        let message = format!("no assignment of the group's partitions: {error}");
        self.tell_not_assigned(message, error);
    }

    /// The next join carries the topics as well, and again if that has to be.
    pub(super) fn not_subscribed(&mut self, error: &v1::Error) {
        if is_of_the_coordinator(error.code()) {
            return self.close();
        }
        let error = Error::told(error);
        let message = format!("the coordinator does not take in what is subscribed now: {error}");
        self.tell_not_assigned(message, error);
    }

    fn tell_not_assigned(&mut self, message: String, error: Error) {
        if self.life == Life::Running {
            let error = Error::new(ErrorKind::NotAssigned, message).with_boxed_source(error.into());
            self.told.push_back(Told::Failed(error));
        }
    }

    /// Stops delivering, and leaves with what is acknowledged.
    pub(in crate::group) fn leave(&mut self, keep_place: bool, now: Instant) {
        self.advance(now);
        match self.life {
            Life::Running => {}
            // It has left.
            Life::Suspended => {
                self.life = Life::Ended;
                return self.close();
            }
            Life::Leaving { .. } | Life::Ended => return,
        }
        for (&place, claim) in &mut self.claims {
            if claim.stop() {
                self.commands.push_back(Command::Detach(place));
            }
        }
        self.life = Life::Leaving { keep_place };
        if self.stream.is_none() && !self.epoch_sent {
            return self.end_leaving();
        }
        self.send_leave(keep_place);
    }

    /// Gives up leaving in order.
    pub(in crate::group) fn abandon(&mut self) {
        self.failure = Some(Error::new(
            ErrorKind::Timeout,
            "the coordinator has not confirmed in time that the member has left",
        ));
        self.end_leaving();
    }

    pub(super) fn end_leaving(&mut self) {
        self.claims.clear();
        self.deadline = None;
        self.life = match self.life {
            Life::Suspended => Life::Suspended,
            _ => Life::Ended,
        };
        self.close();
    }

    /// Final offsets go with it (S27).
    pub(super) fn send_leave(&mut self, keep_place: bool) {
        let joined = self
            .stream
            .as_ref()
            .and_then(|stream| stream.coordinator_epoch);
        if joined.is_none() {
            return;
        }
        let claims: BTreeMap<PartitionId, v1::ClaimRelease> = self
            .claims
            .iter()
            .filter_map(|(place, claim)| Some((*place, claim.final_release(*place)?)))
            .collect();
        let places = claims.iter().map(|(place, it)| (*place, it.claim_epoch));
        let correlation_id = self.ask(Asked::Leave(places.collect()));
        let sent = claims
            .iter()
            .map(|(place, it)| (*place, (it.claim_epoch, it.offset)));
        self.left_with = sent.collect();
        self.send(Request::Leave(v1::Leave {
            correlation_id,
            claims: claims.into_values().collect(),
            keep_place,
        }));
    }

    /// Asks to leave on a stream that is new, once the coordinator has told on it what is still held: an
    /// earlier request may have been carried out.
    pub(super) fn leave_again(&mut self) {
        let Life::Leaving { keep_place } = self.life else {
            return;
        };
        let asked = |stream: &Stream| {
            let mut waiting = stream.waiting.values();
            waiting.any(|asked| matches!(asked, Asked::Leave(_)))
        };
        if !self.stream.as_ref().is_some_and(asked) {
            self.send_leave(keep_place);
        }
    }
}
