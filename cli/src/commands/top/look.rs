//! One look at the cluster through the client: brokers, topics, all ends in one batch, groups.

use std::collections::BTreeMap;
use std::ops::Bound;

use futures::future::join_all;
use qute_client::group::{GroupListing, GroupPartition};
use qute_client::{Client, OffsetQuery, OffsetSpec, Result, TopicDescription};
use tokio::time::Instant;

use super::picture::{Ends, GroupSample, PartitionKey, Sample};

/// Groups whose offsets are asked for in one look, at most; of more, others each time.
const GROUPS_AT_ONCE: usize = 64;

/// Looks at a cluster again and again.
#[derive(Debug)]
pub struct Looker {
    client: Client,
    /// As far as known; offsets may be some looks old.
    groups: BTreeMap<String, GroupSample>,
    /// The last group whose offsets were asked for.
    turn: String,
}

impl Looker {
    /// Looks through this client.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            groups: BTreeMap::new(),
            turn: String::new(),
        }
    }

    /// Looks once. What single leaders or coordinators do not tell is left out and said.
    ///
    /// # Errors
    /// Nobody tells which topics there are.
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn look(&mut self) -> Result<Sample> {
        let groups = self.client.groups();
        let (info, topics, listed) = tokio::join!(
            self.client.cluster_info(),
            self.client.list_topics(),
            groups.list()
        );
        let topics = topics?;
        let mut trouble = Vec::new();
        match listed {
            Ok(listed) => {
                // Before the ends, so that lag is never negative.
                self.take_listed(listed);
                self.take_offsets(&mut trouble).await;
            }
            Err(error) => trouble.push(format!("groups: {error}")),
        }
        let ends = self.ends(&topics, &mut trouble).await;
        let (cluster, controller, brokers) = match info {
            Ok(info) => {
                trouble.extend(info.faults);
                let cluster = info.cluster_id.map(|id| id.to_string());
                (cluster, info.controller, info.brokers)
            }
            Err(error) => {
                trouble.push(error.to_string());
                (None, None, Vec::new())
            }
        };
        Ok(Sample {
            at: Instant::now(),
            cluster,
            controller,
            brokers,
            topics,
            ends,
            groups: self.groups.clone(),
            trouble,
        })
    }

    fn take_listed(&mut self, listed: Vec<GroupListing>) {
        let mut known = std::mem::take(&mut self.groups);
        for group in listed {
            let mut sample = known.remove(&group.group).unwrap_or_default();
            sample.state = group.state.to_string();
            sample.members = u64::from(group.members);
            self.groups.insert(group.group, sample);
        }
    }

    /// Offsets of the groups whose turn it is.
    async fn take_offsets(&mut self, trouble: &mut Vec<String>) {
        let after = (Bound::Excluded(self.turn.clone()), Bound::Unbounded);
        let names = self.groups.range(after).chain(&self.groups);
        let count = self.groups.len().min(GROUPS_AT_ONCE);
        let names: Vec<String> = names.take(count).map(|(name, _)| name.clone()).collect();
        let groups = self.client.groups();
        let asked = names.iter().map(|name| groups.offsets(name));
        let answers = join_all(asked).await;
        for (name, answer) in names.iter().zip(answers) {
            match (answer, self.groups.get_mut(name)) {
                (Ok(offsets), Some(sample)) => {
                    let key = |at: &GroupPartition| (at.topic_id, at.partition);
                    let offsets = offsets.into_iter();
                    sample.offsets = offsets.map(|it| (key(&it.partition), it.offset)).collect();
                    sample.told_at = Some(Instant::now());
                }
                (Err(error), _) => trouble.push(format!("group {name}: {error}")),
                (Ok(_), None) => {}
            }
        }
        if let Some(last) = names.into_iter().next_back() {
            self.turn = last;
        }
    }

    /// What the leaders tell, all of them asked at once.
    async fn ends(
        &self,
        topics: &[TopicDescription],
        trouble: &mut Vec<String>,
    ) -> BTreeMap<PartitionKey, Ends> {
        let mut keys = Vec::new();
        let mut queries = Vec::new();
        for topic in topics {
            for partition in topic.partitions.iter().filter(|at| at.leader.is_some()) {
                keys.push((topic.id, partition.partition));
                let name = topic.name.as_str();
                queries.push(OffsetQuery::new(name, partition.partition, OffsetSpec::End));
            }
        }
        let unled = topics
            .iter()
            .flat_map(|topic| &topic.partitions)
            .filter(|partition| partition.leader.is_none())
            .count();
        if unled > 0 {
            trouble.push(format!("{unled} partitions have no leader"));
        }
        let answers = self.client.list_offsets_many(&queries).await;
        let mut ends = BTreeMap::new();
        for (key, answer) in keys.into_iter().zip(answers) {
            match answer {
                Ok(told) => {
                    let told = Ends {
                        log_start_offset: told.log_start_offset,
                        high_watermark: told.high_watermark,
                    };
                    ends.insert(key, told);
                }
                Err(error) => trouble.push(error.to_string()),
            }
        }
        ends
    }
}
