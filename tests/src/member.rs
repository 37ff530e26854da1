//! A member of a consumer group in raw gRPC, without the client: for load on coordinators, and for what
//! no well-behaved client does.
//!
//! [`Coordinators`] knows the way to a group's coordinator and keeps the connections; [`WireMember`] is
//! one membership: a task that sends heartbeats, deals partitions out when it is asked to, and releases
//! claims that are no targets any more. It does not survive the end of its stream.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use qute_proto::v1::groups_client::GroupsClient;
use qute_proto::v1::session_request::Request;
use qute_proto::v1::session_response::Response;
use qute_proto::v1::{
    AssignTask, ClaimRelease, CommitOffsetsRequest, FindCoordinatorRequest, GroupUpdate, Heartbeat,
    Join, Leave, MemberAssignment, OffsetCommit, Publish, Release, SessionRequest, TopicPartitions,
};
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::wait;

/// Long-lived streams that share a connection: a broker allows 200.
const STREAMS_PER_CONNECTION: usize = 100;
const POLL: Duration = Duration::from_millis(20);
const QUEUED_MAX: usize = 16;

/// The way to coordinators. Cheap to clone; all clones share the connections.
#[derive(Clone, Debug)]
pub struct Coordinators {
    any: GroupsClient<Channel>,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// Address of the coordinator, by partition of `__groups`.
    leaders: BTreeMap<u32, String>,
    /// How many partitions there are; 0: not known yet.
    partitions: u32,
    /// By address; the last one takes more, as many as this.
    channels: HashMap<String, (Vec<Channel>, usize)>,
}

impl Coordinators {
    /// Asks the broker at this address (`host:port`).
    ///
    /// # Errors
    /// When it can't be reached.
    pub async fn connect(address: &str) -> Result<Self> {
        Ok(Self {
            any: GroupsClient::new(channel(address).await?),
            known: Arc::default(),
        })
    }

    /// A connection to the coordinator of a group, with room for one more stream.
    ///
    /// # Errors
    /// When there is no coordinator in time.
    pub async fn of(&self, group: &str) -> Result<GroupsClient<Channel>> {
        self.connection(group, 1).await
    }

    /// Where the coordinator of a group is.
    ///
    /// # Errors
    /// When there is no coordinator in time.
    pub async fn address_of(&self, group: &str) -> Result<String> {
        let mut known = self.known.lock().await;
        self.find(&mut known, group).await
    }

    /// Forgets who coordinates what: it is asked for anew.
    pub async fn forget(&self) {
        self.known.lock().await.leaders.clear();
    }

    /// A connection to the coordinator of a group, for calls that end soon.
    ///
    /// # Errors
    /// When there is no coordinator in time.
    pub async fn briefly(&self, group: &str) -> Result<GroupsClient<Channel>> {
        self.connection(group, 0).await
    }

    async fn connection(&self, group: &str, streams: usize) -> Result<GroupsClient<Channel>> {
        let mut known = self.known.lock().await;
        let address = match known.leader_of(group) {
            Some(address) => address,
            None => self.find(&mut known, group).await?,
        };
        let (channels, left) = known.channels.entry(address.clone()).or_default();
        if channels.is_empty() || *left < streams {
            channels.push(channel(&address).await?);
            *left = STREAMS_PER_CONNECTION;
        }
        *left -= streams;
        let channel = channels.last().context("no connection")?.clone();
        Ok(GroupsClient::new(channel))
    }

    async fn find(&self, known: &mut Known, group: &str) -> Result<String> {
        let end = Instant::now() + wait::LONG;
        loop {
            let request = FindCoordinatorRequest {
                group: group.to_owned(),
            };
            let found = self.any.clone().find_coordinator(request).await;
            let why = match found.map(tonic::Response::into_inner) {
                Ok(found) if found.error.is_none() => match found.leader {
                    Some(leader) if !leader.address.is_empty() => {
                        known.partitions = found.partitions;
                        known
                            .leaders
                            .insert(found.partition, leader.address.clone());
                        return Ok(leader.address);
                    }
                    _ => "no leader is known".to_owned(),
                },
                Ok(found) => found.error.unwrap_or_default().message,
                Err(status) => status.to_string(),
            };
            if Instant::now() >= end {
                bail!("no coordinator of {group}: {why}");
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Known {
    fn leader_of(&self, group: &str) -> Option<String> {
        let partition = qute_proto::partition::partition_of(group.as_bytes(), self.partitions);
        self.leaders.get(&partition).cloned()
    }
}

async fn channel(address: &str) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    let connected = timeout(wait::LONG, endpoint.tcp_nodelay(true).connect()).await;
    connected?.with_context(|| address.to_owned())
}

/// A membership; ends when it is dropped, without a word to the coordinator.
#[derive(Debug)]
pub struct WireMember {
    /// The group's name.
    pub group: String,
    /// The member's id.
    pub id: Bytes,
    /// Its epoch.
    pub epoch: u64,
    requests: mpsc::Sender<SessionRequest>,
    updates: watch::Receiver<GroupUpdate>,
    task: JoinHandle<Result<()>>,
}

impl WireMember {
    /// Joins, and returns once the coordinator has taken the member.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn join(client: &mut GroupsClient<Channel>, join: Join) -> Result<Self> {
        let (requests, mut received) = mpsc::channel(QUEUED_MAX);
        let (group, id) = (join.group.clone(), join.member_id.clone());
        let (epoch, session_ms) = (join.member_epoch, join.session_timeout_ms);
        send(&requests, Request::Join(join)).await?;
        let answers = client
            .session(futures::stream::poll_fn(move |cx| received.poll_recv(cx)))
            .await?;
        let mut answers = answers.into_inner();
        let first = answers.message().await?.and_then(|answer| answer.response);
        match first {
            Some(Response::Joined(_)) => {}
            Some(Response::Error(error)) => bail!("{group}: {:?}: {}", error.code(), error.message),
            other => bail!("{group}: no member, but {other:?}"),
        }
        let (told, updates) = watch::channel(GroupUpdate::default());
        let session = Session {
            requests: requests.clone(),
            told,
            correlation: 0,
            released: 0,
        };
        let period = Duration::from_millis(u64::from(session_ms) / 3);
        let task = tokio::spawn(session.run(answers, period));
        Ok(Self {
            group,
            id,
            epoch,
            requests,
            updates,
            task,
        })
    }

    /// The last update.
    #[must_use]
    pub fn update(&self) -> GroupUpdate {
        self.updates.borrow().clone()
    }

    /// Whether the session is over.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Waits for an update that is as wanted.
    ///
    /// # Errors
    /// When the session ends first, or none comes in time.
    pub async fn until(&mut self, is_it: impl Fn(&GroupUpdate) -> bool) -> Result<GroupUpdate> {
        let found = timeout(wait::LONG, self.updates.wait_for(|update| is_it(update))).await;
        let found = found.with_context(|| format!("no such update of {}", self.group))?;
        Ok(found.context("the session has ended")?.clone())
    }

    /// A commit of this offset for all that it holds.
    #[must_use]
    pub fn commit(&self, offset: u64) -> CommitOffsetsRequest {
        let update = self.updates.borrow();
        let commits = update.claims.iter().map(|claim| OffsetCommit {
            topic_id: claim.topic_id.clone(),
            partition: claim.partition,
            claim_epoch: claim.claim_epoch,
            offset,
            ..OffsetCommit::default()
        });
        CommitOffsetsRequest {
            group: self.group.clone(),
            member_id: self.id.clone(),
            member_epoch: self.epoch,
            offsets: commits.collect(),
        }
    }

    /// Leaves the group; returns once the stream has ended.
    ///
    /// # Errors
    /// When the session has ended before.
    pub async fn leave(mut self) -> Result<()> {
        let leave = Leave {
            correlation_id: u64::MAX,
            ..Leave::default()
        };
        send(&self.requests, Request::Leave(leave)).await?;
        timeout(wait::LONG, &mut self.task).await??
    }
}

impl Drop for WireMember {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn send(requests: &mpsc::Sender<SessionRequest>, request: Request) -> Result<()> {
    let request = SessionRequest {
        request: Some(request),
    };
    requests.send(request).await.ok().context("no stream")
}

struct Session {
    requests: mpsc::Sender<SessionRequest>,
    told: watch::Sender<GroupUpdate>,
    correlation: u64,
    /// The revision that claims were last released for.
    released: u64,
}

impl Session {
    async fn run(
        mut self,
        mut answers: tonic::Streaming<qute_proto::v1::SessionResponse>,
        period: Duration,
    ) -> Result<()> {
        let mut ticker = tokio::time::interval(period);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sequence = 0;
        loop {
            tokio::select! {
                _ = ticker.tick() => {
                    sequence += 1;
                    send(&self.requests, Request::Heartbeat(Heartbeat { sequence })).await?;
                }
                answer = answers.message() => {
                    let Some(answer) = answer? else { return Ok(()) };
                    match answer.response {
                        Some(Response::Update(update)) => self.take(update).await?,
                        Some(Response::Error(error)) => bail!("{:?}: {}", error.code(), error.message),
                        Some(Response::Done(done)) => {
                            // A second publication is harmless, and so is a release that came twice.
                            if done.correlation_id == u64::MAX {
                                ensure!(done.error.is_none(), "{:?}", done.error);
                                return Ok(());
                            }
                        }
                        Some(Response::Joined(_) | Response::Heartbeat(_)) | None => {}
                    }
                }
            }
        }
    }

    async fn take(&mut self, update: GroupUpdate) -> Result<()> {
        if let Some(task) = &update.assign {
            self.correlation += 1;
            let publish = Publish {
                correlation_id: self.correlation,
                generation: task.generation,
                assignment: deal(task),
            };
            send(&self.requests, Request::Publish(publish)).await?;
        }
        let claims = not_targets(&update);
        if !claims.is_empty() && update.revision > self.released {
            self.released = update.revision;
            self.correlation += 1;
            let release = Release {
                correlation_id: self.correlation,
                claims,
            };
            send(&self.requests, Request::Release(release)).await?;
        }
        self.told.send_replace(update);
        Ok(())
    }
}

/// Every partition, to one member after the other.
fn deal(task: &AssignTask) -> Vec<MemberAssignment> {
    let mut partitions: BTreeMap<&Bytes, u32> = BTreeMap::new();
    for topic in task.members.iter().flat_map(|member| &member.topics) {
        let count = partitions.entry(&topic.topic_id).or_default();
        *count = topic.partitions.max(*count);
    }
    let mut hands: Vec<BTreeMap<&Bytes, Vec<u32>>> = vec![BTreeMap::new(); task.members.len()];
    let all = partitions
        .iter()
        .flat_map(|(topic, count)| (0..*count).map(move |p| (*topic, p)));
    for (turn, (topic, partition)) in all.enumerate() {
        let hand = turn % hands.len().max(1);
        if let Some(hand) = hands.get_mut(hand) {
            hand.entry(topic).or_default().push(partition);
        }
    }
    let given = |hand: BTreeMap<&Bytes, Vec<u32>>| {
        let topics = hand.into_iter().map(|(topic, partitions)| TopicPartitions {
            topic_id: topic.clone(),
            partitions,
        });
        topics.collect()
    };
    let members = task.members.iter().zip(hands);
    members
        .map(|(member, hand)| MemberAssignment {
            member_id: member.member_id.clone(),
            partitions: given(hand),
        })
        .collect()
}

fn not_targets(update: &GroupUpdate) -> Vec<ClaimRelease> {
    let is_target = |topic: &Bytes, partition: u32| {
        let mut of_topic = update
            .targets
            .iter()
            .filter(|target| target.topic_id == topic);
        of_topic.any(|target| target.partitions.contains(&partition))
    };
    let claims = update.claims.iter();
    claims
        .filter(|claim| !is_target(&claim.topic_id, claim.partition))
        .map(|claim| ClaimRelease {
            topic_id: claim.topic_id.clone(),
            partition: claim.partition,
            claim_epoch: claim.claim_epoch,
            ..ClaimRelease::default()
        })
        .collect()
}
