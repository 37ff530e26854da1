//! The `Groups` service: finding coordinators, sessions, offsets, groups.
//!
//! Decodes, checks, asks the coordinator of the group's partition, encodes. Answers about what is
//! committed come from a coordinator that has confirmed itself (S18).

mod check;
mod session;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use prost::Message as _;
use qute_proto::group::check_name;
use qute_proto::ids::TopicId;
use qute_proto::partition::partition_of;
use qute_proto::v1::groups_server::{Groups, GroupsServer};
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::server::MESSAGE_BYTES_MAX;
use crate::controller::Controller;
use crate::controller::proposer::error;
use crate::groups::{Coordinator, Coordinators};

/// How long making `__groups` may take.
const ENSURE_WITHIN: Duration = Duration::from_secs(8);
/// How long a coordinator may take to confirm itself, its start included.
const CONFIRM_WITHIN: Duration = Duration::from_secs(5);
/// Messages on one session's stream that wait for its reader.
const ANSWERS_QUEUED: usize = 4;
/// Groups in one answer.
const LISTED_MAX: usize = 1000;
/// An answer that is larger leaves something out.
const ANSWER_BYTES_MAX: usize = MESSAGE_BYTES_MAX / 2;

struct Shared {
    controller: Controller,
    coordinators: Coordinators,
    stop: CancellationToken,
}

impl Shared {
    /// Which partition of `__groups` a group lives in.
    fn partition_of(&self, group: &str) -> Result<u32, v1::Error> {
        check_name(group)
            .map_err(|refused| error(ErrorCode::InvalidGroupName, refused.to_string()))?;
        match self.controller.view().groups_partitions {
            0 => Err(error(
                ErrorCode::NotReady,
                "this broker is not part of a cluster yet; try again or ask another",
            )),
            partitions => Ok(partition_of(group.as_bytes(), partitions)),
        }
    }

    async fn coordinator_of(&self, group: &str) -> Result<Arc<Coordinator>, v1::Error> {
        let partition = self.partition_of(group)?;
        self.coordinators.get(partition).await
    }

    /// One that has confirmed itself after the call.
    async fn confirmed(&self, partition: u32) -> Result<Arc<Coordinator>, v1::Error> {
        let confirmed = async {
            let coordinator = self.coordinators.get(partition).await?;
            coordinator.confirm().await?;
            Ok(coordinator)
        };
        let in_time = tokio::time::timeout(CONFIRM_WITHIN, confirmed).await;
        in_time.unwrap_or_else(|_| {
            let text = "the coordinator could not confirm itself in time; try again";
            Err(error(ErrorCode::NotReady, text))
        })
    }

    async fn confirmed_of(&self, group: &str) -> Result<Arc<Coordinator>, v1::Error> {
        self.confirmed(self.partition_of(group)?).await
    }

    async fn find(
        &self,
        request: &v1::FindCoordinatorRequest,
    ) -> Result<v1::FindCoordinatorResponse, v1::Error> {
        let partition = self.partition_of(&request.group)?;
        let cluster_index = self.controller.ensure_groups_topic(ENSURE_WITHIN).await?;
        Ok(v1::FindCoordinatorResponse {
            topic_id: TopicId::GROUPS.to_wire(),
            partition,
            partitions: self.controller.view().groups_partitions,
            leader: self.coordinators.hint(partition),
            cluster_index,
            error: None,
        })
    }

    async fn commit(
        &self,
        request: v1::CommitOffsetsRequest,
    ) -> Result<Vec<v1::OffsetCommitted>, v1::Error> {
        check::commit(&request)?;
        let coordinator = self.coordinator_of(&request.group).await?;
        coordinator.commit(request).await
    }

    async fn fetch(
        &self,
        request: &v1::FetchOffsetsRequest,
    ) -> Result<Vec<v1::CommittedOffset>, v1::Error> {
        let asked = check::partitions(&request.partitions)?;
        let coordinator = self.confirmed_of(&request.group).await?;
        let offsets: Vec<v1::CommittedOffset> = coordinator.read(|groups| {
            let Some(group) = groups.get(&request.group) else {
                return Vec::new();
            };
            if asked.is_empty() {
                return group.offsets().collect();
            }
            let one = |(topic, partition): (TopicId, u32)| group.offset(topic, partition);
            asked.into_iter().filter_map(one).collect()
        });
        let bytes: usize = offsets.iter().map(prost::Message::encoded_len).sum();
        if bytes > ANSWER_BYTES_MAX {
            let text = format!(
                "the offsets and their metadata have {bytes} bytes, one answer takes \
                 {ANSWER_BYTES_MAX}: ask for fewer partitions at once"
            );
            return Err(error(ErrorCode::InvalidArgument, text));
        }
        Ok(offsets)
    }

    async fn list(
        &self,
        request: &v1::ListGroupsRequest,
    ) -> Result<v1::ListGroupsResponse, v1::Error> {
        let partitions = self.controller.view().groups_partitions;
        if request.partition >= partitions {
            let text = format!(
                "`__groups` has {partitions} partitions, {} is none of them",
                request.partition
            );
            return Err(error(ErrorCode::UnknownPartition, text));
        }
        let coordinator = self.confirmed(request.partition).await?;
        let most = match usize::try_from(request.limit).unwrap_or(LISTED_MAX) {
            0 => LISTED_MAX,
            limit => limit.min(LISTED_MAX),
        };
        Ok(coordinator.read(|groups| {
            let mut rest = groups.iter_after(&request.after);
            let listed = rest.by_ref().take(most);
            v1::ListGroupsResponse {
                groups: listed.map(|(name, group)| group.listing(name)).collect(),
                more: rest.next().is_some(),
                error: None,
            }
        }))
    }

    async fn describe(
        &self,
        request: &v1::DescribeGroupRequest,
    ) -> Result<v1::DescribeGroupResponse, v1::Error> {
        let name = &request.group;
        let coordinator = self.confirmed_of(name).await?;
        let described = coordinator.read(|groups| groups.get(name).map(|it| it.describe(name)));
        let Some(mut described) = described else {
            let text = format!("there is no group `{name}`");
            return Err(error(ErrorCode::UnknownGroup, text));
        };
        if described.encoded_len() > ANSWER_BYTES_MAX {
            for offset in &mut described.offsets {
                offset.metadata.clear();
            }
        }
        described.coordinator = self.controller.me().broker_id;
        described.coordinator_epoch = coordinator.term();
        Ok(described)
    }

    async fn reset(&self, request: v1::ResetOffsetsRequest) -> Result<(), v1::Error> {
        check::reset(&request)?;
        let coordinator = self.coordinator_of(&request.group).await?;
        coordinator.reset(request).await
    }

    async fn delete(&self, request: v1::DeleteGroupRequest) -> Result<(), v1::Error> {
        let coordinator = self.coordinator_of(&request.group).await?;
        coordinator.remove(request.group).await
    }
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct GroupsApi {
    shared: Arc<Shared>,
    streams: TaskTracker,
}

impl GroupsApi {
    /// A service over the coordinators of this broker.
    #[must_use]
    pub fn new(controller: Controller, coordinators: Coordinators) -> Self {
        Self {
            shared: Arc::new(Shared {
                controller,
                coordinators,
                stop: CancellationToken::new(),
            }),
            streams: TaskTracker::new(),
        }
    }

    /// What it serves.
    #[must_use]
    pub fn coordinators(&self) -> &Coordinators {
        &self.shared.coordinators
    }

    /// The tonic server, with its limits set.
    #[must_use]
    pub fn server(&self) -> GroupsServer<Self> {
        GroupsServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Ends the coordinators, then all streams, which tell their members to look elsewhere.
    pub async fn shutdown(&self) {
        self.shared.coordinators.shutdown().await;
        self.shared.stop.cancel();
        self.streams.close();
        self.streams.wait().await;
    }
}

#[tonic::async_trait]
impl Groups for GroupsApi {
    async fn find_coordinator(
        &self,
        request: Request<v1::FindCoordinatorRequest>,
    ) -> Result<Response<v1::FindCoordinatorResponse>, Status> {
        let found = self.shared.find(request.get_ref()).await;
        Ok(Response::new(found.unwrap_or_else(|error| {
            v1::FindCoordinatorResponse {
                error: Some(error),
                ..v1::FindCoordinatorResponse::default()
            }
        })))
    }

    type SessionStream = Pin<Box<dyn Stream<Item = Result<v1::SessionResponse, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (answers, outgoing) = mpsc::channel(ANSWERS_QUEUED);
        let run = session::run(Arc::clone(&self.shared), request.into_inner(), answers);
        self.streams.spawn(run);
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn commit_offsets(
        &self,
        request: Request<v1::CommitOffsetsRequest>,
    ) -> Result<Response<v1::CommitOffsetsResponse>, Status> {
        let committed = self.shared.commit(request.into_inner()).await;
        let (results, error) = split(committed);
        Ok(Response::new(v1::CommitOffsetsResponse { results, error }))
    }

    async fn fetch_offsets(
        &self,
        request: Request<v1::FetchOffsetsRequest>,
    ) -> Result<Response<v1::FetchOffsetsResponse>, Status> {
        let (offsets, error) = split(self.shared.fetch(request.get_ref()).await);
        Ok(Response::new(v1::FetchOffsetsResponse { offsets, error }))
    }

    async fn list_groups(
        &self,
        request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let listed = self.shared.list(request.get_ref()).await;
        Ok(Response::new(listed.unwrap_or_else(|error| {
            v1::ListGroupsResponse {
                error: Some(error),
                ..v1::ListGroupsResponse::default()
            }
        })))
    }

    async fn describe_group(
        &self,
        request: Request<v1::DescribeGroupRequest>,
    ) -> Result<Response<v1::DescribeGroupResponse>, Status> {
        let described = self.shared.describe(request.get_ref()).await;
        Ok(Response::new(described.unwrap_or_else(|error| {
            v1::DescribeGroupResponse {
                error: Some(error),
                ..v1::DescribeGroupResponse::default()
            }
        })))
    }

    async fn reset_offsets(
        &self,
        request: Request<v1::ResetOffsetsRequest>,
    ) -> Result<Response<v1::ResetOffsetsResponse>, Status> {
        let error = self.shared.reset(request.into_inner()).await.err();
        Ok(Response::new(v1::ResetOffsetsResponse { error }))
    }

    async fn delete_group(
        &self,
        request: Request<v1::DeleteGroupRequest>,
    ) -> Result<Response<v1::DeleteGroupResponse>, Status> {
        let error = self.shared.delete(request.into_inner()).await.err();
        Ok(Response::new(v1::DeleteGroupResponse { error }))
    }
}

fn split<T>(outcome: Result<Vec<T>, v1::Error>) -> (Vec<T>, Option<v1::Error>) {
    match outcome {
        Ok(items) => (items, None),
        Err(error) => (Vec::new(), Some(error)),
    }
}
