//! The handle beside a group's stream.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::PartitionId;
use tokio::time::{Instant, timeout_at};

use super::commit::not_alive;
use super::core::{Core, State};
use super::event::TopicPartition;
use super::membership::{Held, Refusal};
use crate::admin::{OffsetSpec, list_offsets};
use crate::config::capped;
use crate::consumer::Position;
use crate::error::{Error, ErrorKind, OffsetBounds, Result};

/// Leaving in the background takes this long at most.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Steers a group's consumer while its stream is being read, from any task. Cheap to clone. It keeps
/// nothing running: once the stream was dropped, its calls give [`ErrorKind::Closed`].
#[derive(Clone)]
pub struct GroupControl {
    core: Arc<Core>,
}

/// Where a partition of this member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupPosition {
    /// The next offset to be handed out.
    pub position: u64,
    /// Everything below is acknowledged.
    pub acknowledged: u64,
    /// What the group has committed, as far as this member knows.
    pub committed: Option<u64>,
    /// How far the high watermark, where it is known, is ahead of what is acknowledged.
    pub lag: Option<u64>,
}

impl GroupControl {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    /// Commits everything that is acknowledged by now, and waits for it, within the client's call
    /// timeout. Several calls at once share what they have in common.
    ///
    /// # Errors
    /// [`ErrorKind::ClaimFenced`] with the first partition that is not this member's any more (the
    /// others are committed); [`ErrorKind::UnknownMember`] if the session is over;
    /// [`ErrorKind::Timeout`]; [`ErrorKind::Closed`].
    ///
    /// # Cancel safety
    /// Dropped, what was asked for may be committed all the same.
    pub async fn commit(&self) -> Result<()> {
        let now = Instant::now();
        let deadline = now + self.core.shared.config.call_timeout;
        let told = self.core.with(|state| -> Result<_> {
            check_open(state)?;
            state.membership.want_acknowledged(now);
            Ok(state.commits.wait(deadline))
        })?;
        self.wait_for_round(told, deadline).await
    }

    async fn wait_for_round(
        &self,
        told: tokio::sync::oneshot::Receiver<Result<()>>,
        deadline: Instant,
    ) -> Result<()> {
        match timeout_at(deadline, told).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::closed("group consumer")),
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                "the coordinator did not answer the commit in time",
            )),
        }
    }

    /// Has everything that is acknowledged by now committed soon. What goes wrong is tried again, or
    /// comes as an event.
    pub fn commit_in_background(&self) {
        let now = Instant::now();
        self.core.with(|state| {
            state.membership.want_acknowledged(now);
            state.commits.request();
        });
    }

    /// Commits this offset, the next one to read, and waits for it. Everything below it counts as
    /// acknowledged.
    ///
    /// # Errors
    /// [`ErrorKind::OffsetOutOfRange`] with the bounds if the log does not reach that far, or begins
    /// later, or the offset lies ahead of what was handed out; [`ErrorKind::OffsetBehind`] if the
    /// group has committed more; [`ErrorKind::ClaimFenced`] if the partition is not this member's. And as
    /// [`GroupControl::commit`].
    ///
    /// # Cancel safety
    /// Dropped, it may be committed all the same.
    pub async fn commit_offset(&self, partition: &TopicPartition, offset: u64) -> Result<()> {
        let deadline = Instant::now() + self.core.shared.config.call_timeout;
        let at = |error: Error| {
            error
                .at(&partition.topic, partition.partition)
                .with_offset(offset)
        };
        let place = self.core.with(|state| {
            check_open(state)?;
            find(state, partition)
        })?;
        // S18: only the leader knows where the log begins.
        if offset < self.position_of(place) {
            let bounds = self.bounds_of(partition, deadline).await?;
            if offset < bounds.log_start_offset {
                let message = "the offset lies before the start of the log";
                let error = Error::new(ErrorKind::OffsetOutOfRange, message);
                return Err(at(error.with_bounds(Some(bounds))));
            }
        }
        let now = Instant::now();
        let wanted = self.core.with(|state| {
            let wanted = state.membership.want_offset(place, offset, now);
            wanted.map(|()| state.commits.wait(deadline))
        });
        match wanted {
            Ok(told) => self.wait_for_round(told, deadline).await,
            Err(Refusal::NotHeld) => Err(at(Error::new(
                ErrorKind::ClaimFenced,
                "the partition is not this member's",
            ))),
            Err(Refusal::Behind(committed)) => Err(at(Error::new(
                ErrorKind::OffsetBehind,
                format!("the group has committed {committed}, and offsets go back by a reset only"),
            ))),
            Err(Refusal::Ahead(end)) => {
                let bounds = self.bounds_of(partition, deadline).await?;
                let message = match offset > bounds.high_watermark {
                    true => "the offset lies beyond the end of the log".to_owned(),
                    false => format!("nothing at or beyond {end} has been handed out yet"),
                };
                let error = Error::new(ErrorKind::OffsetOutOfRange, message);
                Err(at(error.with_bounds(Some(bounds))))
            }
        }
    }

    fn position_of(&self, place: PartitionId) -> u64 {
        let held = self.core.with(|state| state.membership.held());
        held.get(&place).map_or(0, |held| held.acknowledged)
    }

    async fn bounds_of(
        &self,
        partition: &TopicPartition,
        deadline: Instant,
    ) -> Result<OffsetBounds> {
        let shared = &self.core.shared;
        let topic = shared.metadata.topic(&partition.topic, deadline).await?;
        let query = [(partition.partition, OffsetSpec::End)];
        let listed = list_offsets(shared, &topic, &query, deadline).await?;
        let listed = listed.first().ok_or_else(not_alive)?;
        Ok(OffsetBounds {
            log_start_offset: listed.log_start_offset,
            high_watermark: listed.high_watermark,
        })
    }

    /// The partitions that this member reads, and where each stands.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<TopicPartition, GroupPosition> {
        self.core.with(|state| {
            let held = state.membership.held();
            let told = |(place, held): (PartitionId, Held)| {
                let reading = state.topics.get(&place.topic)?;
                let ahead = reading.partitions.high_watermark(place.partition);
                let position = GroupPosition {
                    position: held.position,
                    acknowledged: held.acknowledged,
                    committed: held.committed,
                    lag: ahead.map(|end| end.saturating_sub(held.acknowledged)),
                };
                let name = Arc::clone(&reading.topic.name);
                Some((TopicPartition::new(name, place.partition), position))
            };
            held.into_iter().filter_map(told).collect()
        })
    }

    /// How far the high watermark, where it is known, is ahead of what is acknowledged, per partition of
    /// this member.
    #[must_use]
    pub fn lag(&self) -> BTreeMap<TopicPartition, u64> {
        let positions = self.positions().into_iter();
        positions
            .filter_map(|(partition, position)| Some((partition, position.lag?)))
            .collect()
    }

    /// Goes on elsewhere in a partition of this member, and gives the offset; also in one that has failed.
    /// What is skipped counts as acknowledged, what is gone back over is handed out again; what the group
    /// has committed does not go back by it. Once this has returned, a poll that begins afterwards gives
    /// no record from before it.
    ///
    /// # Errors
    /// [`ErrorKind::ClaimFenced`] if the partition is not read by this member, [`ErrorKind::Closed`],
    /// and what kept the leader from answering; then nothing has changed.
    ///
    /// # Cancel safety
    /// Dropped before it has returned, it has either taken place or changed nothing.
    pub async fn seek(&self, partition: &TopicPartition, to: Position) -> Result<u64> {
        let deadline = Instant::now() + self.core.shared.config.call_timeout;
        let not_read = || {
            let message = "the partition is not this member's";
            let error = Error::new(ErrorKind::ClaimFenced, message);
            error.at(&partition.topic, partition.partition)
        };
        let (place, reader) = self.core.with(|state| -> Result<_> {
            check_open(state)?;
            let place = find(state, partition)?;
            let reading = state.topics.get(&place.topic).ok_or_else(not_read)?;
            Ok((place, reading.partitions.clone()))
        })?;
        let offset = reader.locate(place.partition, to, deadline).await?;
        let now = Instant::now();
        let done = self.core.with(|state| {
            let attach = || reader.attach(place.partition, offset);
            let done = state.membership.seek(place, offset, now, attach);
            if done && state.paused.contains(&place) {
                reader.pause(place.partition);
            }
            state.commits.acknowledged();
            done
        });
        done.then_some(offset).ok_or_else(not_read)
    }

    /// Hands out nothing of these partitions until they are resumed, or go to another member. Those that
    /// are not read are ignored.
    pub fn pause<'a>(&self, partitions: impl IntoIterator<Item = &'a TopicPartition>) {
        self.core.with(|state| {
            for partition in partitions {
                if let Ok(place) = find(state, partition) {
                    state.paused.insert(place);
                    if let Some(reading) = state.topics.get(&place.topic) {
                        reading.partitions.pause(place.partition);
                    }
                }
            }
        });
    }

    /// Goes on with paused partitions.
    pub fn resume<'a>(&self, partitions: impl IntoIterator<Item = &'a TopicPartition>) {
        self.core.with(|state| {
            for partition in partitions {
                if let Ok(place) = find(state, partition)
                    && state.paused.remove(&place)
                    && state.membership.held().contains_key(&place)
                    && let Some(reading) = state.topics.get(&place.topic)
                {
                    reading.partitions.resume(place.partition);
                }
            }
        });
    }

    /// Gives up, at once, partitions that are being revoked: the program will not finish what it has
    /// of them, and whoever gets them reads it again. Others are left as they are.
    pub fn give_up<'a>(&self, partitions: impl IntoIterator<Item = &'a TopicPartition>) {
        let now = Instant::now();
        self.core.with(|state| {
            for partition in partitions {
                if let Ok(place) = find(state, partition) {
                    state.membership.give_up(place, now);
                }
            }
        });
    }

    /// The generation of the group that this member knows: rises whenever members come and go.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.core.with(|state| state.membership.generation())
    }

    /// Stops the stream, commits what is acknowledged, and leaves; a static member keeps its place. See
    /// [`super::GroupConsumer::leave`].
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if the coordinator has not confirmed it by the deadline: what was
    /// acknowledged last may be read again; [`ErrorKind::UnknownMember`] if the session was over.
    ///
    /// # Cancel safety
    /// Dropped, the member leaves in the background.
    pub async fn leave(&self, deadline: Duration) -> Result<()> {
        self.leave_so(self.core.is_static, deadline).await
    }

    /// The same, and a static member gives up its place: its partitions go to others at once.
    ///
    /// # Errors
    /// As [`GroupControl::leave`].
    ///
    /// # Cancel safety
    /// As that of [`GroupControl::leave`].
    pub async fn leave_for_good(&self, deadline: Duration) -> Result<()> {
        self.leave_so(false, deadline).await
    }

    async fn leave_so(&self, keep_place: bool, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + capped(limit);
        self.begin_leaving(keep_place, deadline);
        match timeout_at(deadline, self.core.ended()).await {
            Ok(ended) => ended,
            Err(_) => Err(not_left()),
        }
    }

    pub(super) fn leave_in_background(&self) {
        self.begin_leaving(self.core.is_static, Instant::now() + LEAVE_LIMIT);
    }

    fn begin_leaving(&self, keep_place: bool, by: Instant) {
        let now = Instant::now();
        self.core.with(|state| {
            if state.membership.has_ended() {
                return;
            }
            state.membership.leave(keep_place, now);
            state.leave_by = state.leave_by.max(Some(by));
        });
        self.core.wake.notify_one();
        self.core.probe();
    }
}

fn not_left() -> Error {
    let message = "the coordinator has not confirmed in time that the member has left";
    Error::new(ErrorKind::Timeout, message)
}

fn check_open(state: &State) -> Result<()> {
    match state.membership.is_leaving() || state.deserted {
        true => Err(Error::closed("group consumer")),
        false => Ok(()),
    }
}

/// By name, of the topics that are read.
fn find(state: &State, partition: &TopicPartition) -> Result<PartitionId> {
    let mut readings = state.topics.values().rev();
    // Of two incarnations the one that is held.
    let held = state.membership.held();
    let place = |topic| PartitionId {
        topic,
        partition: partition.partition,
    };
    let named = readings.clone().find(|reading| {
        reading.topic.name == partition.topic && held.contains_key(&place(reading.topic.id))
    });
    let found = named.or_else(|| readings.find(|reading| reading.topic.name == partition.topic));
    found.map(|reading| place(reading.topic.id)).ok_or_else(|| {
        Error::new(ErrorKind::ClaimFenced, "the partition is not this member's")
            .at(&partition.topic, partition.partition)
    })
}

impl fmt::Debug for GroupControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupControl")
            .field("group", &self.core.group)
            .finish_non_exhaustive()
    }
}
