//! Joining, and what a member does on its session.
//!
//! [`Member`] is one session of one member on one stream: dropping it detaches the stream, and no more
//! (S27: a broken stream closes no session). Whatever was proposed takes its course.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use qute_proto::ids::MemberId;
use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{
    CommitClaims, JoinMember, LeaveMember, PublishAssignment, ReleaseClaims, SubscribeMember,
};
use qute_proto::v1::{self, ErrorCode};

use super::lead::{Coordinator, Place, Turn};
use super::mailbox::Mailbox;
use super::sessions::{Applicant, Decision, SessionId, WaiterId};
use crate::controller::proposer::error;
use crate::groups::{replica, state};

/// How long a join that is told to come again waits, if nothing moves before.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);

/// See the module.
pub struct Member {
    seat: Seat,
    mailbox: Arc<Mailbox>,
    /// The revision that the last update had.
    told: Option<u64>,
    /// The last question for an assignment that was passed on.
    asked: Option<u64>,
    session_timeout_ms: u32,
}

/// A member in one session: what it commands may outlive its stream.
#[derive(Clone)]
pub struct Seat {
    coordinator: Arc<Coordinator>,
    applicant: Applicant,
    session: SessionId,
}

/// A proposal of a join: tells the coordinator of its end, however that comes.
struct Proposed<'a> {
    coordinator: &'a Coordinator,
    applicant: &'a Applicant,
    replaces: Option<(MemberId, u64)>,
    /// Whether it was applied, or never will be.
    is_known: bool,
}

impl Drop for Proposed<'_> {
    fn drop(&mut self) {
        self.coordinator
            .join_ended(self.applicant, self.replaces, self.is_known);
    }
}

/// A place in front of a stable name, given up when dropped.
struct Waiting<'a> {
    coordinator: &'a Coordinator,
    waiter: WaiterId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.coordinator.unwait(self.waiter);
    }
}

impl Coordinator {
    /// Makes a member of whoever asks, or gives it another session. Under a stable name that is taken
    /// it waits (S27), for as long as the caller does. The session has to be confirmed by a round
    /// before the member is told ([`super::mailbox::Letters::joined`]).
    ///
    /// # Errors
    /// `UNKNOWN_MEMBER` for an epoch that is over, `GROUP_LIMIT`, what the state machine refuses, and
    /// what keeps a coordinator from coordinating.
    ///
    /// # Cancel safety
    /// A dropped call may have made a member, which then expires.
    pub async fn join(self: &Arc<Self>, join: &v1::Join) -> Result<Member, v1::Error> {
        let applicant = applicant(join)?;
        loop {
            let mut moved = self.watch_moved();
            match self.decide(&applicant)? {
                Place::Decided(Decision::Resume) => {
                    if self.says_the_same(&applicant, join) {
                        if let Some(member) = self.seat(&applicant, join) {
                            return Ok(member);
                        }
                    } else if let Some(member) = self.propose(&applicant, join, None).await? {
                        return Ok(member);
                    }
                }
                Place::Decided(Decision::Propose { replaces }) => {
                    if let Some(member) = self.propose(&applicant, join, replaces).await? {
                        return Ok(member);
                    }
                }
                Place::Decided(Decision::Stale) => {
                    let text = "the member has joined anew since: this membership is over";
                    return Err(error(ErrorCode::UnknownMember, text));
                }
                Place::Waiting(waiter, turn) => {
                    let _waiting = Waiting {
                        coordinator: self,
                        waiter,
                    };
                    match turn.await {
                        Ok(Turn::Come) => {}
                        Ok(Turn::Displaced) => return Err(displaced(&applicant)),
                        Ok(Turn::NoQuorum) => {
                            let refused = replica::Error::NotReady;
                            return Err(self.office.refusal(&refused, self.partition()));
                        }
                        Err(_ended) => return Err(self.ended()),
                    }
                    continue;
                }
                Place::Decided(Decision::Busy | Decision::Wait { .. }) => {}
            }
            // Something is under way, or has just ended otherwise than expected: look again.
            let _ = tokio::time::timeout(AGAIN_WITHIN, moved.changed()).await;
        }
    }

    /// Proposes the join. `None`: what came of it is to be looked up.
    async fn propose(
        self: &Arc<Self>,
        applicant: &Applicant,
        join: &v1::Join,
        replaces: Option<(MemberId, u64)>,
    ) -> Result<Option<Member>, v1::Error> {
        let mut proposed = Proposed {
            coordinator: self,
            applicant,
            replaces,
            is_known: false,
        };
        if replaces.is_none() {
            self.check_members(&applicant.group, applicant.id)?;
            self.check_subscriptions(&applicant.group, applicant.id, join.topics.len())?;
        }
        let command = Command::Join(JoinMember {
            join: Some(join.clone()),
            replaces: replaces.map_or_else(Bytes::new, |(id, _)| id.to_wire()),
            replaces_epoch: replaces.map(|(_, epoch)| epoch),
        });
        let outcome = self.command(command).await;
        let refused = outcome.as_ref().err().map(v1::Error::code);
        proposed.is_known = refused != Some(ErrorCode::OutcomeUnknown);
        // What is applied is taken in before anything else.
        drop(proposed);
        match outcome {
            Ok(_) => {
                tracing::debug!(
                    group = &*applicant.group, member = %applicant.id, epoch = applicant.epoch,
                    instance = &*applicant.instance, client = join.client, "joined"
                );
                if replaces.is_some() {
                    metrics::counter!("qute_group_takeovers_total").increment(1);
                }
                Ok(self.seat(applicant, join))
            }
            Err(refused) => match refused.code() {
                // Nobody guesses what became of it: the state of a confirmed leader says.
                ErrorCode::OutcomeUnknown => self.confirm().await.map(|()| None),
                // Another has the name, contrary to what was known here.
                ErrorCode::NotReady if self.is_live() && replaces.is_some() => Ok(None),
                _ => Err(refused),
            },
        }
    }

    fn seat(self: &Arc<Self>, applicant: &Applicant, join: &v1::Join) -> Option<Member> {
        let (session, mailbox) = self.attach(applicant)?;
        Some(Member {
            seat: Seat {
                coordinator: Arc::clone(self),
                applicant: applicant.clone(),
                session,
            },
            mailbox,
            told: None,
            asked: None,
            session_timeout_ms: join.session_timeout_ms,
        })
    }

    /// Whether a member that goes on says of itself what it said before.
    fn says_the_same(&self, applicant: &Applicant, join: &v1::Join) -> bool {
        let Ok(said) = state::Member::from_join(join) else {
            // The state machine says what is wrong with it.
            return false;
        };
        self.read(|groups| {
            let group = groups.get(&applicant.group);
            let known = group.and_then(|it| it.members().get(applicant.id));
            known.is_some_and(|known| said.says_the_same_as(known))
        })
    }
}

impl Member {
    /// Who it is, for its commands.
    #[must_use]
    pub fn seat(&self) -> &Seat {
        &self.seat
    }

    /// What it is to be told.
    #[must_use]
    pub fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// That the session lives.
    #[must_use]
    pub fn joined(&self) -> v1::Joined {
        v1::Joined {
            coordinator_epoch: self.seat.coordinator.term(),
            session_timeout_ms: self.session_timeout_ms,
        }
    }

    /// A heartbeat has been received. It is answered by the round after it (S26).
    pub fn heartbeat(&self, sequence: u64) {
        metrics::counter!("qute_group_heartbeats_total").increment(1);
        self.seat.coordinator.heartbeat(self.seat.session, sequence);
    }

    /// What concerns the member, if it has not been told already.
    #[must_use]
    pub fn update(&mut self) -> Option<v1::GroupUpdate> {
        let Seat {
            coordinator,
            applicant,
            session,
        } = &self.seat;
        let asked = coordinator.asked(*session);
        let is_asked_anew = asked.is_some() && asked != self.asked;
        let update = coordinator.read(|groups| {
            let group = groups.get(&applicant.group)?;
            let member = group.members().get(applicant.id)?;
            let is_told = self.told.is_some_and(|told| member.revision <= told);
            if is_told && !is_asked_anew {
                return None;
            }
            let mut update = group.update_for(applicant.id)?;
            // Only the latest update counts, so each says it for as long as it holds.
            if asked.is_some() && group.wants_assignment() {
                update.assign = group.assign_task();
            }
            Some(update)
        })?;
        self.asked = asked;
        self.told = Some(update.revision);
        Some(update)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.seat.coordinator.detach(self.seat.session);
    }
}

impl Seat {
    /// What the member reads has changed.
    ///
    /// # Errors
    /// As [`Coordinator::command`].
    pub async fn subscribe(&self, topics: Vec<v1::TopicSubscription>) -> Result<(), v1::Error> {
        let (group, id) = (&self.applicant.group, self.applicant.id);
        self.coordinator
            .check_subscriptions(group, id, topics.len())?;
        let command = Command::Subscribe(SubscribeMember {
            group: self.applicant.group.to_string(),
            member_id: self.applicant.id.to_wire(),
            member_epoch: self.applicant.epoch,
            topics,
        });
        self.coordinator.command(command).await.map(|_| ())
    }

    /// Publishes an assignment for a generation, once.
    ///
    /// # Errors
    /// As [`Coordinator::command`]; `STALE_GENERATION`; `GROUP_LIMIT` for more partitions than the
    /// group may keep offsets of.
    pub async fn publish(
        &self,
        generation: u64,
        assignment: Vec<v1::MemberAssignment>,
    ) -> Result<(), v1::Error> {
        let of_members = assignment.iter().flat_map(|it| &it.partitions);
        self.coordinator
            .check_assigned(of_members.map(|it| it.partitions.len()).sum())?;
        let command = Command::Publish(PublishAssignment {
            group: self.applicant.group.to_string(),
            member_id: self.applicant.id.to_wire(),
            generation,
            assignment,
        });
        self.coordinator.command(command).await.map(|_| ())
    }

    /// S27: gives claims up, each with its final offset.
    ///
    /// # Errors
    /// As [`Coordinator::command`]; of several refused claims the first one's.
    pub async fn release(&self, claims: Vec<v1::ClaimRelease>) -> Result<(), v1::Error> {
        let command = Command::Release(ReleaseClaims {
            group: self.applicant.group.to_string(),
            member_id: self.applicant.id.to_wire(),
            member_epoch: self.applicant.epoch,
            claims,
        });
        first_error(self.coordinator.command(command).await?.offsets)
    }

    /// Leaves the group.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub async fn leave(&self, claims: Vec<v1::ClaimRelease>) -> Result<(), v1::Error> {
        let command = Command::Leave(LeaveMember {
            group: self.applicant.group.to_string(),
            member_id: self.applicant.id.to_wire(),
            member_epoch: self.applicant.epoch,
            claims,
        });
        first_error(self.coordinator.command(command).await?.offsets)
    }

    /// Closes the session; place and claims are kept for a session timeout (S27).
    ///
    /// # Errors
    /// As [`Coordinator::command`]: the final offsets were not committed, and the session is not
    /// closed. Of several refused offsets the first one's error, with the session closed.
    pub async fn keep_place(&self, claims: Vec<v1::ClaimRelease>) -> Result<(), v1::Error> {
        let finals: Vec<v1::OffsetCommit> = claims.into_iter().filter_map(final_offset).collect();
        let mut outcome = Ok(());
        if !finals.is_empty() {
            let request = v1::CommitOffsetsRequest {
                group: self.applicant.group.to_string(),
                member_id: self.applicant.id.to_wire(),
                member_epoch: self.applicant.epoch,
                offsets: finals,
            };
            let command = Command::Commit(CommitClaims {
                request: Some(request),
            });
            outcome = first_error(self.coordinator.command(command).await?.offsets);
        }
        self.coordinator.close(self.session);
        outcome
    }
}

fn applicant(join: &v1::Join) -> Result<Applicant, v1::Error> {
    let id = MemberId::from_wire(&join.member_id)
        .ok_or_else(|| error(ErrorCode::InvalidArgument, "a member id has 16 bytes"))?;
    Ok(Applicant {
        group: join.group.as_str().into(),
        id,
        epoch: join.member_epoch,
        instance: join.instance.as_str().into(),
    })
}

fn displaced(applicant: &Applicant) -> v1::Error {
    let text = format!(
        "another member waits for the stable name `{}` now: give each running program a name of its own",
        applicant.instance
    );
    error(ErrorCode::NotReady, text)
}

fn final_offset(claim: v1::ClaimRelease) -> Option<v1::OffsetCommit> {
    Some(v1::OffsetCommit {
        offset: claim.offset?,
        topic_id: claim.topic_id,
        partition: claim.partition,
        claim_epoch: claim.claim_epoch,
        leader_epoch: claim.leader_epoch,
        metadata: claim.metadata,
    })
}

fn first_error(items: Vec<v1::OffsetCommitted>) -> Result<(), v1::Error> {
    match items.into_iter().find_map(|item| item.error) {
        Some(refused) => Err(refused),
        None => Ok(()),
    }
}
