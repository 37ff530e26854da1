//! Many groups at once: one member each, all reading one topic.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use qute_proto::v1::{AssignorVersion, FetchOffsetsRequest, Join, TopicSubscription};
use tokio::time::Instant;

use crate::member::{Coordinators, WireMember};
use crate::wait;

/// Calls under way at once.
const AT_ONCE: usize = 64;
const POLL: Duration = Duration::from_millis(20);

/// One member of each group; they go on until it is dropped, or their broker is gone.
#[derive(Debug)]
pub struct Fleet {
    members: Vec<WireMember>,
}

/// Name of a group of the fleet.
#[must_use]
pub fn group(number: usize) -> String {
    format!("group-{number:06}")
}

impl Fleet {
    /// Joins that many groups, and waits until each member holds every partition of the topic.
    ///
    /// # Errors
    /// When a coordinator refuses, or doesn't get there.
    pub async fn join(
        coordinators: &Coordinators,
        topic: &TopicSubscription,
        groups: usize,
        session_timeout_ms: u32,
    ) -> Result<Self> {
        let join = |number: usize| {
            let coordinators = coordinators.clone();
            let topic = topic.clone();
            async move {
                let join = Join {
                    group: group(number),
                    member_id: Bytes::from((number as u128 + 1).to_be_bytes().to_vec()),
                    member_epoch: 1,
                    client: "fleet".to_owned(),
                    assignors: vec![AssignorVersion {
                        name: "dealt".to_owned(),
                        version: 1,
                    }],
                    topics: vec![topic.clone()],
                    session_timeout_ms,
                    ..Join::default()
                };
                let mut coordinator = coordinators.of(&join.group).await?;
                let mut member = WireMember::join(&mut coordinator, join).await?;
                let all = topic.partitions as usize;
                member.until(|update| update.claims.len() == all).await?;
                anyhow::Ok(member)
            }
        };
        let joined = stream::iter(0..groups).map(join).buffered(AT_ONCE);
        Ok(Self {
            members: joined.try_collect().await?,
        })
    }

    /// Each group commits this offset for all its partitions.
    ///
    /// # Errors
    /// When a commit is refused.
    pub async fn commit(&self, coordinators: &Coordinators, offset: u64) -> Result<()> {
        let commit = |number: usize| self.commit_one(coordinators, number, offset);
        let committed = stream::iter(0..self.members.len()).map(commit);
        committed.buffer_unordered(AT_ONCE).try_collect().await
    }

    /// The group of that number commits this offset for all its partitions.
    ///
    /// # Errors
    /// When the commit is refused, or there is no such group.
    pub async fn commit_one(
        &self,
        coordinators: &Coordinators,
        number: usize,
        offset: u64,
    ) -> Result<()> {
        let member = self.members.get(number).context("no such group")?;
        let mut coordinator = coordinators.briefly(&member.group).await?;
        let answer = coordinator.commit_offsets(member.commit(offset)).await?;
        let answer = answer.into_inner();
        let refused = answer.results.iter().filter_map(|it| it.error.as_ref());
        let refused = answer.error.iter().chain(refused).next();
        ensure!(refused.is_none(), "{}: {refused:?}", member.group);
        Ok(())
    }

    /// How many sessions have ended.
    #[must_use]
    pub fn ended(&self) -> usize {
        self.members
            .iter()
            .filter(|member| member.has_ended())
            .count()
    }
}

/// Waits until the coordinators of all groups serve, and wants this committed offset in each partition of
/// each.
///
/// # Errors
/// When one doesn't serve in time, or an offset is another.
pub async fn verify(
    coordinators: &Coordinators,
    groups: usize,
    partitions: u32,
    offset: u64,
) -> Result<()> {
    let end = Instant::now() + wait::LONG;
    loop {
        match verify_now(coordinators, groups, partitions, offset).await {
            Err(_) if Instant::now() < end => {
                // It may be another broker by now.
                coordinators.forget().await;
                tokio::time::sleep(POLL).await;
            }
            verified => return verified,
        }
    }
}

async fn verify_now(
    coordinators: &Coordinators,
    groups: usize,
    partitions: u32,
    offset: u64,
) -> Result<()> {
    let look = |number: usize| {
        let coordinators = coordinators.clone();
        async move {
            let group = group(number);
            let mut coordinator = coordinators.briefly(&group).await?;
            let request = FetchOffsetsRequest {
                group: group.clone(),
                partitions: Vec::new(),
            };
            let answer = coordinator.fetch_offsets(request).await?.into_inner();
            ensure!(answer.error.is_none(), "{group}: {:?}", answer.error);
            let right = answer.offsets.iter().all(|it| it.offset == offset);
            ensure!(
                right && answer.offsets.len() == partitions as usize,
                "{group}: {:?} instead of {offset}",
                answer.offsets
            );
            anyhow::Ok(())
        }
    };
    let looked = stream::iter(0..groups).map(look);
    looked.buffer_unordered(AT_ONCE).try_collect().await
}
