//! One look at the cluster through the client: brokers, topics, all ends in one batch, groups.

use std::collections::BTreeMap;

use qute_client::{Client, OffsetQuery, OffsetSpec, Result, TopicDescription};
use tokio::time::Instant;

use super::picture::{Ends, PartitionKey, Sample};

/// Looks at a cluster again and again.
#[derive(Debug)]
pub struct Looker {
    client: Client,
}

impl Looker {
    /// Looks through this client.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Looks once. What single leaders or coordinators do not tell is left out and said.
    ///
    /// # Errors
    /// Nobody tells which topics there are.
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn look(&mut self) -> Result<Sample> {
        let (info, topics) = tokio::join!(self.client.cluster_info(), self.client.list_topics());
        let topics = topics?;
        let mut trouble = Vec::new();
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
            groups: BTreeMap::new(),
            trouble,
        })
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
