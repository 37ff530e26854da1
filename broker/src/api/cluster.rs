//! `v1.Cluster`: metadata and administration.
//!
//! Any broker answers metadata from its own copy of the `__cluster` state; only changes and
//! authoritative answers need the leader. Before the cluster is formed `Hello` and
//! `DescribeCluster` answer, everything else is `NOT_READY`.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use qute_proto::batch::{BATCH_BYTES_MAX, RECORD_BYTES_MAX, UNCOMPRESSED_BYTES_MAX};
use qute_proto::ids::{BrokerId, ClusterId, PartitionId};
use qute_proto::v1::cluster_server::{Cluster, ClusterServer};
use qute_proto::v1::{
    self, AddPartitionsRequest, AddPartitionsResponse, BrokerInfo, BrokerState, CreateTopicRequest,
    CreateTopicResponse, DeleteTopicRequest, DeleteTopicResponse, DescribeClusterRequest,
    DescribeClusterResponse, ErrorCode, HelloRequest, HelloResponse, Limits, MetadataRequest,
    MetadataResponse, PartitionInfo, ReplicaInfo, ReplicaRole, TopicInfo, WatchMetadataRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::server::MESSAGE_BYTES_MAX;
use crate::controller::Controller;
use crate::controller::proposer::error;
use crate::controller::view::{ClusterView, Placement, Topic};

/// Changes that come within this time are pushed as one.
const COALESCE: Duration = Duration::from_millis(20);
/// Pushes that a slow watcher may be behind.
const PUSHES_MAX: usize = 2;
/// Topics named in one request, at most.
const TOPICS_MAX: usize = 10_000;

/// The cluster service of one broker.
#[derive(Clone)]
pub struct ClusterApi {
    controller: Controller,
    stop: CancellationToken,
}

impl ClusterApi {
    /// Serves for this controller; `stop` ends the watches.
    #[must_use]
    pub fn new(controller: Controller, stop: CancellationToken) -> Self {
        Self { controller, stop }
    }

    /// The tonic server, with its limits set.
    #[must_use]
    pub fn server(&self) -> ClusterServer<Self> {
        ClusterServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    fn cluster_id(&self) -> Option<ClusterId> {
        self.controller
            .former()
            .formed()
            .borrow()
            .as_ref()
            .map(|formed| formed.cluster)
    }

    async fn answer_metadata(
        &self,
        request: &MetadataRequest,
    ) -> Result<MetadataResponse, v1::Error> {
        if request.topics.len() > TOPICS_MAX {
            return Err(error(
                ErrorCode::InvalidArgument,
                "too many topics are named",
            ));
        }
        not_before_founding(&self.controller)?;
        if !self.controller.wait_index(request.min_cluster_index).await {
            return Err(error(
                ErrorCode::NotReady,
                format!(
                    "this broker has not caught up with index {} of `__cluster` yet; try again \
                     or ask another",
                    request.min_cluster_index
                ),
            ));
        }
        if request.authoritative {
            self.controller.proposer().confirm().await?;
        }
        let mut response = picture(&self.controller, &request.topics);
        response.authoritative = request.authoritative;
        Ok(response)
    }
}

fn not_before_founding(controller: &Controller) -> Result<(), v1::Error> {
    if controller.view().cluster_id.is_some() {
        return Ok(());
    }
    let waits = controller.waits().join("; ");
    let text = format!("this broker can't answer yet, try again: {waits}");
    Err(error(ErrorCode::NotReady, text))
}

/// The present state as one message.
fn picture(controller: &Controller, topics: &[String]) -> MetadataResponse {
    let view = controller.view();
    let chosen: Vec<&Arc<Topic>> = if topics.is_empty() {
        view.topics.values().collect()
    } else {
        topics.iter().filter_map(|name| view.topic(name)).collect()
    };
    MetadataResponse {
        cluster_id: view.cluster_id.map(ClusterId::to_wire).unwrap_or_default(),
        cluster_index: view.index,
        brokers: brokers(controller, &view),
        topics: chosen
            .into_iter()
            .map(|topic| topic_info(controller, topic))
            .collect(),
        controller: controller.controller(),
        authoritative: false,
        error: None,
    }
}

/// Members that have registered themselves. Newer addresses that were only heard of count: a
/// client reaches a moved broker at once.
fn brokers(controller: &Controller, view: &ClusterView) -> Vec<BrokerInfo> {
    view.brokers
        .values()
        .filter(|broker| broker.registered)
        .map(|broker| {
            let heard = controller.book().get(broker.id);
            let heard = heard.filter(|heard| heard.boot >= broker.boot);
            BrokerInfo {
                broker_id: broker.id.0,
                name: broker.name.clone(),
                address: heard
                    .map(|heard| heard.client_address)
                    .unwrap_or_else(|| broker.client_address.clone()),
                rack: broker.rack.clone(),
                state: controller.state(broker.id).into(),
            }
        })
        .collect()
}

fn topic_info(controller: &Controller, topic: &Topic) -> TopicInfo {
    let partitions = (0..).zip(&topic.partitions).map(|(number, placement)| {
        let partition = PartitionId {
            topic: topic.id,
            partition: number,
        };
        partition_info(controller, partition, placement)
    });
    TopicInfo {
        name: topic.name.clone(),
        topic_id: topic.id.to_wire(),
        partitions: partitions.collect(),
        config: topic.config.clone().into_iter().collect::<HashMap<_, _>>(),
    }
}

fn partition_info(
    controller: &Controller,
    partition: PartitionId,
    placement: &Placement,
) -> PartitionInfo {
    let known = controller.leaders().get(partition);
    // A leader that is gone is no hint.
    let there = |broker: &BrokerId| controller.state(*broker) != BrokerState::Dead;
    let leader = known.and_then(|known| known.broker).filter(there);
    PartitionInfo {
        partition: partition.partition,
        leader: leader.map_or(0, |broker| broker.0),
        leader_epoch: known.map_or(0, |known| known.term),
        replicas: placement
            .replicas
            .iter()
            .map(|assignment| ReplicaInfo {
                broker_id: assignment.broker.0,
                replica_id: assignment.replica.0,
                role: ReplicaRole::Voter.into(),
            })
            .collect(),
    }
}

/// Pushes a picture whenever it has changed, until the watcher or the broker goes.
async fn push(
    controller: Controller,
    pushes: mpsc::Sender<Result<MetadataResponse, Status>>,
    stop: CancellationToken,
) {
    let mut view = controller.watch_view();
    let mut members = controller.watch_members();
    let mut leaders = controller.leaders().changes();
    let mut book = controller.book().changes();
    let mut last: Option<MetadataResponse> = None;
    loop {
        view.borrow_and_update();
        members.borrow_and_update();
        leaders.borrow_and_update();
        book.borrow_and_update();
        let now = picture(&controller, &[]);
        if last.as_ref() != Some(&now) {
            last = Some(now.clone());
            tokio::select! {
                sent = pushes.send(Ok(now)) => {
                    if sent.is_err() {
                        return;
                    }
                }
                () = stop.cancelled() => return,
            }
        }
        let changed = async {
            tokio::select! {
                Ok(()) = view.changed() => {}
                Ok(()) = members.changed() => {}
                Ok(()) = leaders.changed() => {}
                Ok(()) = book.changed() => {}
                else => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => {}
            () = pushes.closed() => return,
            () = stop.cancelled() => return,
        }
        tokio::time::sleep(COALESCE).await;
    }
}

#[tonic::async_trait]
impl Cluster for ClusterApi {
    async fn hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloResponse>, Status> {
        let request = request.into_inner();
        tracing::debug!(client = request.client, "a client has connected");
        let me = self.controller.me();
        // A client that expects another cluster sees it by the id and decides for itself (S28).
        Ok(Response::new(HelloResponse {
            cluster_id: self
                .cluster_id()
                .map(ClusterId::to_wire)
                .unwrap_or_default(),
            broker_id: me.broker_id,
            broker_name: me.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            limits: Some(Limits {
                record_bytes_max: wide(RECORD_BYTES_MAX),
                batch_bytes_max: wide(BATCH_BYTES_MAX),
                uncompressed_batch_bytes_max: wide(UNCOMPRESSED_BYTES_MAX),
                message_bytes_max: wide(MESSAGE_BYTES_MAX),
            }),
        }))
    }

    async fn metadata(
        &self,
        request: Request<MetadataRequest>,
    ) -> Result<Response<MetadataResponse>, Status> {
        let outcome = self.answer_metadata(&request.into_inner()).await;
        Ok(Response::new(outcome.unwrap_or_else(|error| {
            MetadataResponse {
                cluster_id: self
                    .cluster_id()
                    .map(ClusterId::to_wire)
                    .unwrap_or_default(),
                error: Some(error),
                ..MetadataResponse::default()
            }
        })))
    }

    type WatchMetadataStream = Pin<Box<dyn Stream<Item = Result<MetadataResponse, Status>> + Send>>;

    async fn watch_metadata(
        &self,
        _request: Request<WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        let (pushes, pushed) = mpsc::channel(PUSHES_MAX);
        let controller = self.controller.clone();
        let stop = self.stop.clone();
        tokio::spawn(async move {
            // Nothing is pushed before there is something to say.
            let mut view = controller.watch_view();
            tokio::select! {
                founded = view.wait_for(|view| view.cluster_id.is_some()) => {
                    if founded.is_err() {
                        return;
                    }
                }
                () = pushes.closed() => return,
                () = stop.cancelled() => return,
            }
            push(controller, pushes, stop).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(pushed))))
    }

    async fn describe_cluster(
        &self,
        _request: Request<DescribeClusterRequest>,
    ) -> Result<Response<DescribeClusterResponse>, Status> {
        let mut controller = self.controller.controller();
        let leads = |hint: &v1::LeaderHint| hint.broker_id == self.controller.me().broker_id;
        // A leader without a majority goes on believing in itself: ask the others first.
        if controller.as_ref().is_some_and(leads)
            && self.controller.proposer().confirm().await.is_err()
        {
            controller = None;
        }
        let view = self.controller.view();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Response::new(DescribeClusterResponse {
            cluster_id: self
                .cluster_id()
                .map(ClusterId::to_wire)
                .unwrap_or_default(),
            formed: view.cluster_id.is_some(),
            controller,
            brokers: brokers(&self.controller, &view),
            founding_brokers: count(view.founding.len()),
            cluster_index: view.index,
            topics: count(view.topics.len()),
            partitions: count(view.partitions()),
            broker_id: self.controller.me().broker_id,
        }))
    }

    async fn create_topic(
        &self,
        request: Request<CreateTopicRequest>,
    ) -> Result<Response<CreateTopicResponse>, Status> {
        let outcome = self.controller.create_topic(request.into_inner()).await;
        Ok(Response::new(match outcome {
            Ok((topic, cluster_index)) => CreateTopicResponse {
                topic: Some(topic_info(&self.controller, &topic)),
                cluster_index,
                error: None,
            },
            Err(error) => CreateTopicResponse {
                error: Some(error),
                ..CreateTopicResponse::default()
            },
        }))
    }

    async fn add_partitions(
        &self,
        request: Request<AddPartitionsRequest>,
    ) -> Result<Response<AddPartitionsResponse>, Status> {
        let outcome = self.controller.add_partitions(request.into_inner()).await;
        Ok(Response::new(match outcome {
            Ok((topic, cluster_index)) => AddPartitionsResponse {
                topic: Some(topic_info(&self.controller, &topic)),
                cluster_index,
                error: None,
            },
            Err(error) => AddPartitionsResponse {
                error: Some(error),
                ..AddPartitionsResponse::default()
            },
        }))
    }

    async fn delete_topic(
        &self,
        request: Request<DeleteTopicRequest>,
    ) -> Result<Response<DeleteTopicResponse>, Status> {
        let outcome = self.controller.delete_topic(request.into_inner()).await;
        Ok(Response::new(match outcome {
            Ok(cluster_index) => DeleteTopicResponse {
                cluster_index,
                error: None,
            },
            Err(error) => DeleteTopicResponse {
                cluster_index: 0,
                error: Some(error),
            },
        }))
    }
}

fn wide(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
