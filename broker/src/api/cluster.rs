//! `v1.Cluster`: metadata and administration.
//!
//! Any broker answers metadata from its own copy of the `__cluster` state; only changes and
//! authoritative answers need the leader. Before the cluster is formed `Hello` and
//! `DescribeCluster` answer, everything else is `NOT_READY`.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use qute_proto::batch::{BATCH_BYTES_MAX, RECORD_BYTES_MAX, UNCOMPRESSED_BYTES_MAX};
use qute_proto::ids::ClusterId;
use qute_proto::v1::cluster_server::{Cluster, ClusterServer};
use qute_proto::v1::{
    self, AddPartitionsRequest, AddPartitionsResponse, AlterTopicRequest, AlterTopicResponse,
    CreateTopicRequest, CreateTopicResponse, DeleteTopicRequest, DeleteTopicResponse,
    DescribeClusterRequest, DescribeClusterResponse, ErrorCode, HelloRequest, HelloResponse,
    Limits, MetadataRequest, MetadataResponse, WatchMetadataRequest,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::pictures::{Pictures, Watcher, brokers, picture, topic_info};
use super::server::MESSAGE_BYTES_MAX;
use crate::controller::Controller;
use crate::controller::proposer::error;

/// Topics named in one request, at most.
const TOPICS_MAX: usize = 10_000;

/// The cluster service of one broker.
#[derive(Clone)]
pub struct ClusterApi {
    controller: Controller,
    pictures: Arc<Pictures>,
    stop: CancellationToken,
}

impl ClusterApi {
    /// Serves for this controller; `stop` ends the watches.
    #[must_use]
    pub fn new(controller: Controller, stop: CancellationToken) -> Self {
        Self {
            controller,
            pictures: Arc::default(),
            stop,
        }
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
        let watcher = Watcher::new(
            self.controller.clone(),
            Arc::clone(&self.pictures),
            self.stop.clone(),
        );
        Ok(Response::new(Box::pin(watcher.stream())))
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
        let (topics, partitions) = view.counts();
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
            topics: count(topics),
            partitions: count(partitions),
            broker_id: self.controller.me().broker_id,
            faults: self.controller.faults(),
            time_ms: self.controller.wall_ms(),
            storage: Some(self.controller.storage_status()),
            replicas: Some(self.controller.replica_status()),
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

    async fn alter_topic(
        &self,
        request: Request<AlterTopicRequest>,
    ) -> Result<Response<AlterTopicResponse>, Status> {
        let outcome = self.controller.alter_topic(request.into_inner()).await;
        Ok(Response::new(match outcome {
            Ok((topic, cluster_index)) => AlterTopicResponse {
                topic: Some(topic_info(&self.controller, &topic)),
                cluster_index,
                error: None,
            },
            Err(error) => AlterTopicResponse {
                error: Some(error),
                ..AlterTopicResponse::default()
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
