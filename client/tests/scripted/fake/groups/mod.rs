//! The `Groups` service of the scripted broker: coordinators that keep the rules that members lean on, and
//! a script that says what goes wrong.
//!
//! `__groups` is made by the first FindCoordinator. A group is with whoever leads its partition
//! ([`Fake::set_coordinator`]). Nobody expires by time: [`Fake::expire`].

mod state;

use std::collections::VecDeque;

use qute_proto::partition::partition_of;
use qute_proto::v1::groups_server::Groups;
use qute_proto::v1::session_request::Request as Asked;
use qute_proto::v1::session_response::Response as Told;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
pub use state::Group;

pub const GROUPS: &str = "__groups";

/// The script, and what has happened.
pub struct Script {
    pub groups: BTreeMap<String, Group>,
    /// Partitions of `__groups`, and who leads them when they are made.
    pub partitions: usize,
    pub created_leader: (u64, u64),
    /// The answers to the next calls but those of sessions; what is left is carried out.
    pub refuse: VecDeque<v1::Error>,
    /// So many calls are carried out, and then fail.
    pub cut_calls: usize,
    /// Calls are never answered by this broker.
    pub silent: Option<u64>,
    /// Groups of a page of the list.
    pub page: usize,
    /// Calls but those of sessions, by broker.
    pub calls: Vec<u64>,
    /// Heartbeats are taken and not acknowledged.
    pub mute_heartbeats: bool,
    pub heartbeats: usize,
    /// The answers to the next joins.
    pub refuse_join: VecDeque<v1::Error>,
    /// Nothing that members publish is taken in.
    pub ignore_publish: bool,
    /// Commits and releases are carried out, and not answered.
    pub mute_commits: bool,
    /// Counted up to break all sessions.
    pub session_cuts: usize,
    /// Sessions under way.
    pub sessions: usize,
    /// Every committed offset in the order in which they were taken: partition and offset.
    pub commits: Vec<(u32, u64)>,
    /// Every join.
    pub joins: Vec<v1::Join>,
    /// Every leave.
    pub leaves: Vec<v1::Leave>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            groups: BTreeMap::new(),
            partitions: 4,
            created_leader: (1, 1),
            refuse: VecDeque::new(),
            cut_calls: 0,
            silent: None,
            page: 2,
            calls: Vec::new(),
            mute_heartbeats: false,
            heartbeats: 0,
            refuse_join: VecDeque::new(),
            ignore_publish: false,
            mute_commits: false,
            session_cuts: 0,
            sessions: 0,
            commits: Vec::new(),
            joins: Vec::new(),
            leaves: Vec::new(),
        }
    }
}

impl Fake {
    /// The group as the coordinator has it.
    pub fn group(&self, name: &str) -> Group {
        let state = self.state.lock();
        state.groups.groups.get(name).cloned().unwrap_or_default()
    }

    /// From now on this broker coordinates the group, in this epoch. Its sessions elsewhere end.
    pub fn set_coordinator(&self, group: &str, broker: u64, epoch: u64) {
        self.change(|state| {
            state.make_groups();
            let partition = state.groups_partition(group);
            state.groups_topic()[partition].leader = (broker, epoch);
        });
    }

    /// The member's session has expired.
    pub fn expire(&self, group: &str, member: &[u8]) {
        self.change(|state| {
            let group = state.groups.groups.get_mut(group).unwrap();
            group.remove(member);
        });
    }

    /// Ends all sessions without a word.
    pub fn cut_sessions(&self) {
        self.change(|state| state.groups.session_cuts += 1);
    }

    pub fn committed(&self, group: &str, partition: u32) -> Option<u64> {
        let group = self.group(group);
        let mut slots = group.slots.iter();
        let (_, slot) = slots.find(|((_, number), _)| *number == partition)?;
        slot.committed.as_ref().map(|it| it.offset)
    }
}

impl State {
    fn make_groups(&mut self) {
        if !self.topics.contains_key(GROUPS) {
            self.cluster_index += 1;
            let partition = Partition {
                leader: self.groups.created_leader,
                ..Partition::default()
            };
            let partitions = vec![partition; self.groups.partitions];
            self.topics
                .insert(GROUPS.to_owned(), (TopicId::GROUPS, partitions));
        }
    }

    fn groups_topic(&mut self) -> &mut Vec<Partition> {
        &mut self.topics.get_mut(GROUPS).unwrap().1
    }

    fn groups_partition(&mut self, group: &str) -> usize {
        let partitions = u32::try_from(self.groups_topic().len()).unwrap();
        partition_of(group.as_bytes(), partitions) as usize
    }

    /// Why this broker does not coordinate what is in this partition of `__groups`.
    fn not_coordinator(&mut self, broker: u64, partition: usize) -> Option<v1::Error> {
        if !self.topics.contains_key(GROUPS) {
            return Some(error(ErrorCode::NotLeader));
        }
        let (leader, epoch) = self.groups_topic()[partition].leader;
        (leader != broker).then(|| not_leader(leader, epoch))
    }

    fn coordinates(&mut self, broker: u64, group: &str) -> Option<v1::Error> {
        if !self.topics.contains_key(GROUPS) {
            return Some(error(ErrorCode::NotLeader));
        }
        let partition = self.groups_partition(group);
        self.not_coordinator(broker, partition)
    }
}

impl Endpoint {
    /// Carries a call out as the script says.
    async fn group_call<R>(
        &self,
        group: &str,
        refused: impl FnOnce(v1::Error) -> R,
        done: impl FnOnce(&mut State) -> R,
    ) -> Result<Response<R>, Status> {
        if self.fake.state.lock().groups.silent == Some(self.broker) {
            std::future::pending::<()>().await;
        }
        self.fake.change(|state| {
            state.groups.calls.push(self.broker);
            let scripted = state.groups.refuse.pop_front();
            let elsewhere = || state.coordinates(self.broker, group);
            if let Some(error) = scripted.or_else(elsewhere) {
                return Ok(Response::new(refused(error)));
            }
            let answer = done(state);
            if state.groups.cut_calls > 0 {
                state.groups.cut_calls -= 1;
                return Err(Status::unavailable("cut"));
            }
            Ok(Response::new(answer))
        })
    }
}

#[tonic::async_trait]
impl Groups for Endpoint {
    type SessionStream = Boxed<v1::SessionResponse>;

    async fn find_coordinator(
        &self,
        request: Request<v1::FindCoordinatorRequest>,
    ) -> Result<Response<v1::FindCoordinatorResponse>, Status> {
        let group = request.into_inner().group;
        self.fake.change(|state| {
            state.make_groups();
            let partition = state.groups_partition(&group);
            let partitions = state.groups_topic();
            let (broker_id, leader_epoch) = partitions[partition].leader;
            Ok(Response::new(v1::FindCoordinatorResponse {
                topic_id: TopicId::GROUPS.to_wire(),
                partition: u32::try_from(partition).unwrap(),
                partitions: u32::try_from(partitions.len()).unwrap(),
                leader: Some(v1::LeaderHint {
                    broker_id,
                    leader_epoch,
                    address: String::new(),
                }),
                cluster_index: state.cluster_index,
                error: None,
            }))
        })
    }

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (answers, stream) = mpsc::unbounded_channel();
        let session = Session {
            endpoint: self.clone(),
            answers,
            member: None,
            told: None,
        };
        tokio::spawn(session.run(request.into_inner()));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            stream,
        ))))
    }

    async fn commit_offsets(
        &self,
        request: Request<v1::CommitOffsetsRequest>,
    ) -> Result<Response<v1::CommitOffsetsResponse>, Status> {
        let request = request.into_inner();
        let refused = |error| v1::CommitOffsetsResponse {
            error: Some(error),
            ..Default::default()
        };
        if self.fake.state.lock().groups.mute_commits {
            let _ = self
                .group_call(&request.group, refused, |state| commit(state, &request))
                .await;
            std::future::pending::<()>().await;
        }
        let done = |state: &mut State| commit(state, &request);
        self.group_call(&request.group, refused, done).await
    }

    async fn fetch_offsets(
        &self,
        request: Request<v1::FetchOffsetsRequest>,
    ) -> Result<Response<v1::FetchOffsetsResponse>, Status> {
        let request = request.into_inner();
        let refused = |error| v1::FetchOffsetsResponse {
            error: Some(error),
            ..Default::default()
        };
        let done = |state: &mut State| v1::FetchOffsetsResponse {
            offsets: (state.groups.groups.get(&request.group))
                .map_or_else(Vec::new, Group::offsets),
            error: None,
        };
        self.group_call(&request.group, refused, done).await
    }

    async fn list_groups(
        &self,
        request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let v1::ListGroupsRequest {
            partition, after, ..
        } = request.into_inner();
        self.fake.change(|state| {
            state.groups.calls.push(self.broker);
            let error = state.not_coordinator(self.broker, partition as usize);
            if error.is_some() {
                return Ok(Response::new(v1::ListGroupsResponse {
                    error,
                    ..Default::default()
                }));
            }
            let page = state.groups.page;
            let names: Vec<String> = state.groups.groups.keys().cloned().collect();
            let mut here: Vec<_> = names
                .into_iter()
                .filter(|name| *name > after)
                .filter(|name| state.groups_partition(name) == partition as usize)
                .collect();
            let more = here.len() > page;
            here.truncate(page);
            let groups = here
                .iter()
                .map(|name| state.groups.groups[name].listing(name));
            Ok(Response::new(v1::ListGroupsResponse {
                groups: groups.collect(),
                more,
                error: None,
            }))
        })
    }

    async fn describe_group(
        &self,
        request: Request<v1::DescribeGroupRequest>,
    ) -> Result<Response<v1::DescribeGroupResponse>, Status> {
        let name = request.into_inner().group;
        let refused = |error| v1::DescribeGroupResponse {
            error: Some(error),
            ..Default::default()
        };
        let broker = self.broker;
        let done = |state: &mut State| match state.groups.groups.get(&name) {
            None => refused(error(ErrorCode::UnknownGroup)),
            Some(group) => v1::DescribeGroupResponse {
                coordinator: broker,
                coordinator_epoch: 1,
                ..group.describe(&name)
            },
        };
        self.group_call(&name, refused, done).await
    }

    async fn reset_offsets(
        &self,
        request: Request<v1::ResetOffsetsRequest>,
    ) -> Result<Response<v1::ResetOffsetsResponse>, Status> {
        let request = request.into_inner();
        let refused = |error| v1::ResetOffsetsResponse { error: Some(error) };
        let done = |state: &mut State| match state.groups.groups.get_mut(&request.group) {
            None => refused(error(ErrorCode::UnknownGroup)),
            Some(group) => v1::ResetOffsetsResponse {
                error: group.reset(&request).err(),
            },
        };
        self.group_call(&request.group, refused, done).await
    }

    async fn delete_group(
        &self,
        request: Request<v1::DeleteGroupRequest>,
    ) -> Result<Response<v1::DeleteGroupResponse>, Status> {
        let name = request.into_inner().group;
        let refused = |error| v1::DeleteGroupResponse { error: Some(error) };
        let done = |state: &mut State| {
            let found = state.groups.groups.get(&name);
            let error = match found.map(|group| group.members.is_empty()) {
                None => Some(error(ErrorCode::UnknownGroup)),
                Some(false) => Some(error(ErrorCode::GroupNotEmpty)),
                Some(true) => None,
            };
            if error.is_none() {
                state.groups.groups.remove(&name);
            }
            v1::DeleteGroupResponse { error }
        };
        self.group_call(&name, refused, done).await
    }
}

fn commit(state: &mut State, request: &v1::CommitOffsetsRequest) -> v1::CommitOffsetsResponse {
    let script = &mut state.groups;
    let is_member = !request.member_id.is_empty();
    if is_member && !script.groups.contains_key(&request.group) {
        return v1::CommitOffsetsResponse {
            error: Some(error(ErrorCode::UnknownMember)),
            ..Default::default()
        };
    }
    let group = script.groups.entry(request.group.clone()).or_default();
    match group.commit(request) {
        Err(error) => v1::CommitOffsetsResponse {
            error: Some(error),
            ..Default::default()
        },
        Ok(results) => {
            let taken = request.offsets.iter().zip(&results);
            let taken = taken.filter(|(_, result)| result.error.is_none());
            script
                .commits
                .extend(taken.map(|(offset, _)| (offset.partition, offset.offset)));
            v1::CommitOffsetsResponse {
                results,
                error: None,
            }
        }
    }
}

/// A stream of a member.
struct Session {
    endpoint: Endpoint,
    answers: UnboundedSender<Result<v1::SessionResponse, Status>>,
    /// Group and id, once joined.
    member: Option<(String, Bytes)>,
    /// The last update sent.
    told: Option<v1::GroupUpdate>,
}

impl Session {
    async fn run(mut self, mut requests: Streaming<v1::SessionRequest>) {
        let fake = self.endpoint.fake.clone();
        let cuts = {
            let mut state = fake.state.lock();
            state.groups.sessions += 1;
            state.groups.session_cuts
        };
        let mut changed = fake.changed.subscribe();
        loop {
            tokio::select! {
                request = requests.next() => match request {
                    Some(Ok(v1::SessionRequest { request: Some(request) })) => {
                        if !self.serve(request) {
                            break;
                        }
                    }
                    _ => break,
                },
                _ = changed.changed() => {
                    if fake.state.lock().groups.session_cuts > cuts {
                        let _ = self.answers.send(Err(Status::unavailable("cut")));
                        break;
                    }
                    if !self.update() {
                        break;
                    }
                }
            }
        }
        fake.change(|state| state.groups.sessions -= 1);
    }

    fn tell(&self, response: Told) {
        let _ = self.answers.send(Ok(v1::SessionResponse {
            response: Some(response),
        }));
    }

    /// False: the session has ended.
    fn serve(&mut self, request: Asked) -> bool {
        let (endpoint, member) = (self.endpoint.clone(), self.member.clone());
        let told = endpoint.fake.change(|state| {
            let broker = endpoint.broker;
            if let Some((group, _)) = &member
                && let Some(error) = state.coordinates(broker, group)
            {
                return Err(error);
            }
            match (request, &member) {
                (Asked::Join(join), None) => {
                    state.groups.joins.push(join.clone());
                    let scripted = state.groups.refuse_join.pop_front();
                    let elsewhere = || state.coordinates(broker, &join.group);
                    if let Some(error) = scripted.or_else(elsewhere) {
                        return Err(error);
                    }
                    self.member = Some((join.group.clone(), join.member_id.clone()));
                    let partition = state.groups_partition(&join.group);
                    let coordinator_epoch = state.groups_topic()[partition].leader.1;
                    let session_timeout_ms = join.session_timeout_ms;
                    let groups = &mut state.groups.groups;
                    let group = groups.entry(join.group.clone()).or_default();
                    group.join(join)?;
                    Ok(Some(Told::Joined(v1::Joined {
                        coordinator_epoch,
                        session_timeout_ms,
                    })))
                }
                (Asked::Heartbeat(v1::Heartbeat { sequence }), Some(_)) => {
                    state.groups.heartbeats += 1;
                    let ack = Told::Heartbeat(v1::HeartbeatAck { sequence });
                    Ok((!state.groups.mute_heartbeats).then_some(ack))
                }
                (request, Some((name, id))) => {
                    let script = &mut state.groups;
                    let Some(group) = script.groups.get_mut(name) else {
                        return Err(error(ErrorCode::UnknownMember));
                    };
                    let mute = script.mute_commits;
                    let (correlation_id, result) = match request {
                        Asked::Topics(it) => (it.correlation_id, group.subscribe(id, it.topics)),
                        Asked::Publish(it) if script.ignore_publish => (it.correlation_id, Ok(())),
                        Asked::Publish(it) => (it.correlation_id, group.publish(&it)),
                        Asked::Release(it) => {
                            let result = group.release(id, &it.claims, &mut script.commits);
                            if mute {
                                return Ok(None);
                            }
                            (it.correlation_id, result)
                        }
                        Asked::Leave(it) => {
                            script.leaves.push(it.clone());
                            let result = group.leave(id, &it, &mut script.commits);
                            (it.correlation_id, result)
                        }
                        Asked::Join(_) | Asked::Heartbeat(_) => {
                            return Err(error(ErrorCode::InvalidArgument));
                        }
                    };
                    Ok(Some(Told::Done(v1::Done {
                        correlation_id,
                        error: result.err(),
                    })))
                }
                (_, None) => Err(error(ErrorCode::InvalidArgument)),
            }
        });
        match told {
            Ok(told) => {
                if let Some(told) = told {
                    self.tell(told);
                }
                self.update()
            }
            Err(error) => {
                self.tell(Told::Error(error));
                false
            }
        }
    }

    /// Sends what has changed for the member; false if it is none any more.
    fn update(&mut self) -> bool {
        let Some((name, id)) = &self.member else {
            return true;
        };
        let mut state = self.endpoint.fake.state.lock();
        if let Some(error) = state.coordinates(self.endpoint.broker, name) {
            drop(state);
            self.tell(Told::Error(error));
            return false;
        }
        let group = state.groups.groups.get(name);
        let update = group.and_then(|group| group.update_for(id));
        drop(state);
        match update {
            None => {
                self.tell(Told::Error(error(ErrorCode::UnknownMember)));
                false
            }
            Some(update) => {
                if self.told.as_ref() != Some(&update) {
                    self.told = Some(update.clone());
                    self.tell(Told::Update(update));
                }
                true
            }
        }
    }
}
