//! A client of the `Groups` service without any cleverness.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::groups_client::GroupsClient;
use qute_proto::v1::session_request::{Request, Subscribed};
use qute_proto::v1::session_response::Response;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::broker::tests::cluster::{Cluster, LONG, connect, found};

/// A session that no test outlasts.
pub(super) const FOREVER_MS: u32 = 600_000;

/// Brokers that allow short sessions.
pub(super) async fn start() -> Cluster {
    Cluster::start(|_, config| config.group_session_timeout_min_ms = 100).await
}

/// The topic that all members of these tests read; nothing of it has to exist.
pub(super) fn topic() -> TopicId {
    TopicId(uuid::Uuid::from_u128(7777))
}

pub(super) async fn groups(cluster: &Cluster, at: usize) -> GroupsClient<Channel> {
    GroupsClient::new(connect(cluster.address(at)).await)
}

fn running(cluster: &Cluster) -> impl Iterator<Item = usize> + '_ {
    (0..cluster.brokers.len()).filter(|at| cluster.brokers[*at].is_some())
}

/// The broker that coordinates a group, once all brokers agree that it does.
pub(super) async fn coordinator(cluster: &Cluster, group: &str) -> usize {
    let request = v1::FindCoordinatorRequest {
        group: group.to_owned(),
    };
    found("a coordinator", async || {
        let mut told = Vec::new();
        for at in running(cluster) {
            let mut client = groups(cluster, at).await;
            let answer = client.find_coordinator(request.clone()).await;
            let leader = answer.unwrap().into_inner().leader;
            told.push(leader.map_or(0, |leader| leader.broker_id));
        }
        let led = running(cluster).find(|at| cluster.broker(*at).broker_id().0 == told[0])?;
        if !told.iter().all(|one| *one == told[0]) {
            return None;
        }
        let error = describe(cluster, led, group).await.error;
        error
            .is_none_or(|error| error.code() == ErrorCode::UnknownGroup)
            .then_some(led)
    })
    .await
}

pub(super) async fn describe(
    cluster: &Cluster,
    at: usize,
    group: &str,
) -> v1::DescribeGroupResponse {
    let request = v1::DescribeGroupRequest {
        group: group.to_owned(),
    };
    let answer = groups(cluster, at).await.describe_group(request).await;
    answer.unwrap().into_inner()
}

/// Committed offsets by partition.
pub(super) async fn committed(cluster: &Cluster, at: usize, group: &str) -> HashMap<u32, u64> {
    let request = v1::FetchOffsetsRequest {
        group: group.to_owned(),
        partitions: Vec::new(),
    };
    let answer = groups(cluster, at).await.fetch_offsets(request).await;
    let answer = answer.unwrap().into_inner();
    assert_eq!(answer.error, None);
    let offsets = answer.offsets.iter();
    offsets.map(|one| (one.partition, one.offset)).collect()
}

pub(super) fn assignor(version: u32) -> v1::AssignorVersion {
    v1::AssignorVersion {
        name: "sticky".to_owned(),
        version,
    }
}

pub(super) fn subscription(partitions: u32) -> v1::TopicSubscription {
    v1::TopicSubscription {
        topic_id: topic().to_wire(),
        partitions,
    }
}

/// A join of a new member that reads four partitions.
pub(super) fn join(group: &str, session_timeout_ms: u32) -> v1::Join {
    v1::Join {
        group: group.to_owned(),
        member_id: MemberId::random().to_wire(),
        member_epoch: 1,
        assignors: vec![assignor(1)],
        topics: vec![subscription(4)],
        session_timeout_ms,
        ..v1::Join::default()
    }
}

/// One session of one member.
pub(super) struct Member {
    pub(super) join: v1::Join,
    requests: mpsc::Sender<v1::SessionRequest>,
    answers: Streaming<v1::SessionResponse>,
    pub(super) joined: Option<v1::Joined>,
    pub(super) update: v1::GroupUpdate,
    pub(super) updates: usize,
    pub(super) acked: u64,
    dones: HashMap<u64, v1::Done>,
    pub(super) error: Option<v1::Error>,
    pub(super) is_over: bool,
}

impl Member {
    /// Asks to join, and doesn't wait.
    pub(super) async fn open(cluster: &Cluster, at: usize, join: v1::Join) -> Self {
        let (requests, outgoing) = mpsc::channel(64);
        let mut client = groups(cluster, at).await;
        let first = v1::SessionRequest {
            request: Some(Request::Join(join.clone())),
        };
        requests.send(first).await.unwrap();
        let answers = client.session(ReceiverStream::new(outgoing)).await;
        Self {
            join,
            requests,
            answers: answers.unwrap().into_inner(),
            joined: None,
            update: v1::GroupUpdate::default(),
            updates: 0,
            acked: 0,
            dones: HashMap::new(),
            error: None,
            is_over: false,
        }
    }

    /// Joins.
    pub(super) async fn start(cluster: &Cluster, at: usize, join: v1::Join) -> Self {
        let mut member = Self::open(cluster, at, join).await;
        member.until(|it| it.updates > 0).await;
        member
    }

    pub(super) async fn send(&self, request: Request) {
        let request = v1::SessionRequest {
            request: Some(request),
        };
        // The session may be over.
        let _ = self.requests.send(request).await;
    }

    pub(super) async fn beat(&self, sequence: u64) {
        self.send(Request::Heartbeat(v1::Heartbeat { sequence }))
            .await;
    }

    /// Takes in the next answer.
    pub(super) async fn next(&mut self) {
        let next = tokio::time::timeout(LONG, self.answers.next()).await;
        let response = match next.expect("silence") {
            Some(Ok(response)) => response.response.unwrap(),
            Some(Err(_)) | None => {
                self.is_over = true;
                return;
            }
        };
        match response {
            Response::Joined(joined) => self.joined = Some(joined),
            Response::Heartbeat(ack) => self.acked = ack.sequence,
            Response::Update(update) => {
                assert!(self.joined.is_some(), "an update before the session lives");
                assert!(update.revision >= self.update.revision);
                self.update = update;
                self.updates += 1;
            }
            Response::Done(done) => {
                self.dones.insert(done.correlation_id, done);
            }
            Response::Error(error) => self.error = Some(error),
        }
    }

    /// Waits until something holds.
    pub(super) async fn until(&mut self, check: impl Fn(&Self) -> bool) {
        while !check(self) {
            let said = (&self.error, &self.update);
            assert!(!self.is_over && self.error.is_none(), "over: {said:?}");
            self.next().await;
        }
    }

    /// Waits for the end of the session, and why it came.
    pub(super) async fn ended(&mut self) -> v1::Error {
        while !self.is_over {
            self.next().await;
        }
        self.error.clone().expect("ended without a word")
    }

    async fn done(&mut self, correlation_id: u64) -> Option<v1::Error> {
        while !self.dones.contains_key(&correlation_id) {
            assert!(!self.is_over && self.error.is_none(), "{:?}", self.error);
            self.next().await;
        }
        self.dones.remove(&correlation_id).unwrap().error
    }

    pub(super) async fn asked(&mut self) -> v1::AssignTask {
        self.until(|it| it.update.assign.is_some()).await;
        self.update.assign.clone().unwrap()
    }

    /// Waits for the task of a group of so many members.
    pub(super) async fn asked_about(&mut self, members: usize) -> v1::AssignTask {
        let is_it = |task: &v1::AssignTask| task.members.len() == members;
        self.until(|it| it.update.assign.as_ref().is_some_and(is_it))
            .await;
        self.asked().await
    }

    /// Publishes who gets what.
    pub(super) async fn publish(
        &mut self,
        generation: u64,
        assignment: &[(&Bytes, &[u32])],
    ) -> Option<v1::Error> {
        let correlation_id = correlation();
        let assignment = assignment.iter().map(|(member, partitions)| {
            let partitions = v1::TopicPartitions {
                topic_id: topic().to_wire(),
                partitions: partitions.to_vec(),
            };
            v1::MemberAssignment {
                member_id: Bytes::clone(member),
                partitions: vec![partitions],
            }
        });
        let publish = v1::Publish {
            correlation_id,
            generation,
            assignment: assignment.collect(),
        };
        self.send(Request::Publish(publish)).await;
        self.done(correlation_id).await
    }

    pub(super) async fn subscribe(&mut self, partitions: u32) -> Option<v1::Error> {
        let correlation_id = correlation();
        let topics = vec![subscription(partitions)];
        self.send(Request::Topics(Subscribed {
            correlation_id,
            topics,
        }))
        .await;
        self.done(correlation_id).await
    }

    /// The claims that it holds, by partition, with their epochs.
    pub(super) fn claims(&self) -> Vec<(u32, u64)> {
        let claims = self.update.claims.iter();
        let mut claims: Vec<_> = claims.map(|it| (it.partition, it.claim_epoch)).collect();
        claims.sort_unstable();
        claims
    }

    pub(super) async fn until_claims(&mut self, claims: &[(u32, u64)]) {
        self.until(|it| it.claims() == claims).await;
    }

    pub(super) async fn release(
        &mut self,
        claims: &[(u32, u64, Option<u64>)],
    ) -> Option<v1::Error> {
        let correlation_id = correlation();
        let claims = releases(claims);
        self.send(Request::Release(v1::Release {
            correlation_id,
            claims,
        }))
        .await;
        self.done(correlation_id).await
    }

    pub(super) async fn leave(
        mut self,
        claims: &[(u32, u64, Option<u64>)],
        keep_place: bool,
    ) -> Option<v1::Error> {
        let correlation_id = correlation();
        let claims = releases(claims);
        self.send(Request::Leave(v1::Leave {
            correlation_id,
            claims,
            keep_place,
        }))
        .await;
        let error = self.done(correlation_id).await;
        while !self.is_over {
            self.next().await;
        }
        assert_eq!(self.error, None, "the stream just ends");
        error
    }

    /// Commits offsets of claims.
    pub(super) async fn commit(
        &self,
        cluster: &Cluster,
        at: usize,
        offsets: &[(u32, u64, u64)],
    ) -> v1::CommitOffsetsResponse {
        let member = (self.join.member_id.clone(), self.join.member_epoch);
        commit(cluster, at, &self.join.group, member, offsets).await
    }
}

fn correlation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn releases(claims: &[(u32, u64, Option<u64>)]) -> Vec<v1::ClaimRelease> {
    let release = |(partition, claim_epoch, offset): &(u32, u64, Option<u64>)| v1::ClaimRelease {
        topic_id: topic().to_wire(),
        partition: *partition,
        claim_epoch: *claim_epoch,
        offset: *offset,
        ..v1::ClaimRelease::default()
    };
    claims.iter().map(release).collect()
}

/// Commits (partition, claim epoch, offset) as a member, or as nobody.
pub(super) async fn commit(
    cluster: &Cluster,
    at: usize,
    group: &str,
    (member_id, member_epoch): (Bytes, u64),
    offsets: &[(u32, u64, u64)],
) -> v1::CommitOffsetsResponse {
    let offsets = offsets
        .iter()
        .map(|(partition, claim_epoch, offset)| v1::OffsetCommit {
            topic_id: topic().to_wire(),
            partition: *partition,
            claim_epoch: *claim_epoch,
            offset: *offset,
            ..v1::OffsetCommit::default()
        });
    let request = v1::CommitOffsetsRequest {
        group: group.to_owned(),
        member_id,
        member_epoch,
        offsets: offsets.collect(),
    };
    let answer = groups(cluster, at).await.commit_offsets(request).await;
    answer.unwrap().into_inner()
}

/// Of each item of a commit: the offset in force, or the refusal.
pub(super) fn outcomes(response: &v1::CommitOffsetsResponse) -> Vec<Result<u64, ErrorCode>> {
    assert_eq!(response.error, None);
    let outcome = |one: &v1::OffsetCommitted| match &one.error {
        None => Ok(one.offset),
        Some(error) => Err(error.code()),
    };
    response.results.iter().map(outcome).collect()
}

pub(super) fn code(error: Option<v1::Error>) -> Option<ErrorCode> {
    error.map(|error| error.code())
}
