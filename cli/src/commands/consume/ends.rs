//! `-e` in a group: where each claimed partition ended when it was claimed, and how far the member is.
//!
//! A partition is paused from its claim until its end is known, and again from its end on. A pause may
//! come too late (the partition's reader may be made only afterwards): batches that are handed out
//! before the end is known wait for it, those from the end on are left to whoever reads next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use qute_client::group::{Event, GroupBatch, GroupControl, TopicPartition};
use qute_client::{Client, ConsumedRecord, ListedOffset, OffsetQuery, OffsetSpec, Result};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::group::listed;
use crate::exit::Failure;

/// How long to leave leaders alone that did not tell.
const ASK_AGAIN: Duration = Duration::from_millis(200);

type Told = Vec<(TopicPartition, Result<ListedOffset>)>;

/// See the module header.
#[derive(Debug)]
pub struct Ends {
    /// Claimed, as far as the member was told.
    seen: BTreeSet<TopicPartition>,
    /// Claimed, and the end is not known yet.
    unmeasured: BTreeSet<TopicPartition>,
    /// Not read to the end yet.
    wanted: BTreeMap<TopicPartition, u64>,
    /// Batches of partitions whose end is not known yet.
    early: VecDeque<GroupBatch>,
    /// Something of these was handed out that is left to whoever reads next.
    left_over: BTreeSet<TopicPartition>,
    /// Leaders are being asked.
    asking: Option<AbortOnDropHandle<Told>>,
    /// When something last happened.
    progressed: Instant,
    /// How long nothing may happen.
    patience: Duration,
}

impl Ends {
    /// Gives up when nothing has happened for so long.
    pub fn new(patience: Duration) -> Self {
        Self {
            seen: BTreeSet::new(),
            unmeasured: BTreeSet::new(),
            wanted: BTreeMap::new(),
            early: VecDeque::new(),
            left_over: BTreeSet::new(),
            asking: None,
            progressed: Instant::now(),
            patience,
        }
    }

    /// The member was told of the claim.
    pub fn has_seen(&self, partition: &TopicPartition) -> bool {
        self.seen.contains(partition)
    }

    /// Everything that is claimed is read to its end.
    pub fn are_reached(&self) -> bool {
        self.unmeasured.is_empty() && self.wanted.is_empty() && self.early.is_empty()
    }

    /// There is more to do than to take what comes.
    pub fn is_to_be_looked_after(&self) -> bool {
        !self.unmeasured.is_empty() || self.wanted.is_empty() || !self.early.is_empty()
    }

    /// Why there is no waiting any longer.
    pub fn stalled(&self) -> Option<Failure> {
        if self.progressed.elapsed() < self.patience {
            return None;
        }
        let unread: Vec<_> = self.unmeasured.iter().chain(self.wanted.keys()).collect();
        let what = match unread.is_empty() {
            true => "the group has not settled".to_owned(),
            false => format!("not read to their ends: {}", listed(unread)),
        };
        let patience = humantime::format_duration(self.patience);
        Some(Failure::timeout(format!(
            "nothing came for {patience}; {what}"
        )))
    }

    /// Takes note of what happens to partitions.
    pub fn follow(&mut self, event: &Event, control: &GroupControl) {
        self.progressed = Instant::now();
        match event {
            Event::Assigned(assigned) => {
                control.pause(&assigned.partitions);
                self.seen.extend(assigned.partitions.iter().cloned());
                self.unmeasured.extend(assigned.partitions.iter().cloned());
            }
            Event::Revoking(revoking) => {
                // What is left over is never acknowledged: waiting for it would hold up the next owner.
                let early = self.early.iter().map(GroupBatch::topic_partition);
                self.left_over.extend(early);
                let given_up = revoking.partitions.iter();
                control.give_up(given_up.filter(|it| self.left_over.contains(*it)));
                self.forget(&revoking.partitions);
            }
            Event::Lost(lost) => self.forget(&lost.partitions),
            Event::Failed(error) => {
                // Nothing more of it comes, and it is still claimed.
                if let Some((topic, partition)) = error.topic().zip(error.partition()) {
                    let partition = TopicPartition::new(topic, partition);
                    self.unmeasured.remove(&partition);
                    self.wanted.remove(&partition);
                }
            }
            _ => {}
        }
    }

    fn forget(&mut self, partitions: &[TopicPartition]) {
        self.early
            .retain(|batch| !partitions.contains(&batch.topic_partition()));
        for partition in partitions {
            self.seen.remove(partition);
            self.left_over.remove(partition);
            self.unmeasured.remove(partition);
            self.wanted.remove(partition);
        }
    }

    /// The batch, if the end of its partition is known; else it is kept until that is.
    pub fn admit(&mut self, batch: GroupBatch) -> Option<GroupBatch> {
        if !self.unmeasured.contains(&batch.topic_partition()) {
            return Some(batch);
        }
        self.early.push_back(batch);
        None
    }

    /// The first batch that was kept and need not be any longer.
    pub fn next_admitted(&mut self) -> Option<GroupBatch> {
        let known = |batch: &GroupBatch| !self.unmeasured.contains(&batch.topic_partition());
        let place = self.early.iter().position(known)?;
        self.early.remove(place)
    }

    /// Leaves out the records from the end on; the partition is through if there are any, or none are
    /// missing.
    pub fn cut(
        &mut self,
        partition: &TopicPartition,
        records: &mut Vec<ConsumedRecord>,
        control: &GroupControl,
    ) {
        let Some(end) = self.wanted.get(partition).copied() else {
            self.left_over.insert(partition.clone());
            records.clear();
            return;
        };
        let last = records.last().map(|record| record.offset);
        let count = records.len();
        records.retain(|record| record.offset < end);
        if records.len() < count {
            self.left_over.insert(partition.clone());
        }
        if last.is_some_and(|last| last.saturating_add(1) >= end) {
            self.wanted.remove(partition);
            control.pause([partition]);
        }
    }

    /// Sees what was read without any records coming: nothing was left, or it was out of range.
    pub fn recheck(&mut self, control: &GroupControl) {
        // What waits has been handed out, and is not read.
        if self.wanted.is_empty() || !self.early.is_empty() {
            return;
        }
        let positions = control.positions();
        self.wanted.retain(|partition, end| {
            let held = positions.get(partition);
            let through = held.is_some_and(|held| held.position >= *end);
            if through {
                control.pause([partition]);
            }
            !through
        });
    }

    /// Asks the leaders for the ends, all at once; those that do not tell are asked again. Without any
    /// to ask for it never ends.
    ///
    /// # Cancel safety
    /// Cancelled, it goes on with the same answers.
    pub async fn measure(&mut self, client: &Client, control: &GroupControl) {
        if self.asking.is_none() {
            if self.unmeasured.is_empty() {
                return std::future::pending().await;
            }
            let (client, asked) = (client.clone(), self.unmeasured.clone());
            self.asking = Some(AbortOnDropHandle::new(tokio::spawn(ask(client, asked))));
        }
        let Some(asking) = &mut self.asking else {
            return;
        };
        let told = asking.await.unwrap_or_default();
        self.asking = None;
        for (partition, told) in told {
            if let Ok(told) = told
                && self.unmeasured.remove(&partition)
            {
                control.resume([&partition]);
                self.wanted.insert(partition, told.high_watermark);
            }
        }
    }
}

async fn ask(client: Client, asked: BTreeSet<TopicPartition>) -> Told {
    let query =
        |it: &TopicPartition| OffsetQuery::new(it.topic.to_string(), it.partition, OffsetSpec::End);
    let queries: Vec<_> = asked.iter().map(query).collect();
    let answers = client.list_offsets_many(&queries).await;
    if answers.iter().any(Result::is_err) {
        tokio::time::sleep(ASK_AGAIN).await;
    }
    asked.into_iter().zip(answers).collect()
}
