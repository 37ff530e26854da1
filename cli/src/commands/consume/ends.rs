//! `-e` in a group: where each claimed partition ended when it was claimed, and how far the member is.
//!
//! A partition is paused from its claim until its end is known, and again from its end on.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use qute_client::group::{Event, GroupControl, TopicPartition};
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
        self.unmeasured.is_empty() && self.wanted.is_empty()
    }

    /// There is more to do than to take what comes.
    pub fn is_to_be_looked_after(&self) -> bool {
        !self.unmeasured.is_empty() || self.wanted.is_empty()
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
            Event::Revoking(revoking) => self.forget(&revoking.partitions),
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
        for partition in partitions {
            self.seen.remove(partition);
            self.unmeasured.remove(partition);
            self.wanted.remove(partition);
        }
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
            // Handed out before the pause: read by whoever comes next.
            records.clear();
            return;
        };
        let last = records.last().map(|record| record.offset);
        records.retain(|record| record.offset < end);
        if last.is_some_and(|last| last.saturating_add(1) >= end) {
            self.wanted.remove(partition);
            control.pause([partition]);
        }
    }

    /// Sees what was read without any records coming: nothing was left, or it was out of range.
    pub fn recheck(&mut self, control: &GroupControl) {
        if self.wanted.is_empty() {
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
