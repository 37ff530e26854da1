//! Create, grow, list, describe and delete topics.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use qute_proto::ids::{BrokerId, TopicId};
use qute_proto::topic::check_name;
use qute_proto::v1::{self, ErrorCode, cluster_client::ClusterClient};
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::{
    OffsetSpec, PartitionDescription, ReplicaDescription, ReplicaRole, TopicChanges,
    TopicDescription, TopicSpec, list_each_offset,
};
use crate::client::{Client, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{ControllerRoute, Incarnation, Topic};
use crate::net::{Address, Backoff, CallError, Lane, cluster_client};

/// Limit of one broker's answer to a change before another one is asked. The change may be made
/// nevertheless, as if the answer had been lost: asking again does no harm.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(4);
/// How long `describe` waits for offsets of partitions whose leader does not answer.
const OFFSETS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a broker that does not answer may hold up `create`.
const SILENT_BROKER: Duration = Duration::from_secs(2);

impl Client {
    /// Creates a topic. Returns once every partition has a leader and every broker that answers
    /// knows about it, so that writing to it works through any of them.
    ///
    /// Retries by itself until the client's call timeout; a topic that a first attempt made
    /// before its answer was lost counts as created.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidTopicName`], [`ErrorKind::TopicExists`],
    /// [`ErrorKind::InvalidArgument`], [`ErrorKind::NotEnoughBrokers`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Cancelled, the topic may or may not be created; [`Client::describe_topic`] tells.
    pub async fn create_topic(&self, spec: TopicSpec) -> Result<TopicDescription> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let (id, cluster_index) = self.ask_for_topic(&spec, deadline).await?;
        self.until_usable(&spec.name, id, cluster_index, deadline)
            .await
    }

    /// Has the topic made, without waiting until it can be used: gives its incarnation, if it is
    /// known, and the index from which on views have it.
    pub(crate) async fn ask_for_topic(
        &self,
        spec: &TopicSpec,
        deadline: Instant,
    ) -> Result<(Option<TopicId>, u64)> {
        check_name(&spec.name).map_err(|error| Error::topic_name(&error))?;
        let request = v1::CreateTopicRequest {
            name: spec.name.clone(),
            partitions: spec.partitions.unwrap_or(0),
            replicas: spec.replicas.unwrap_or(0),
            config: spec.config.clone().into_iter().collect(),
        };
        let call = |mut client: ClusterClient<Channel>| {
            let request = request.clone();
            async move { client.create_topic(request).await }
        };
        let created =
            at_controller(&self.shared, deadline, call, |reply| reply.error.as_ref()).await;
        match created {
            Ok(reply) => {
                let id = reply
                    .topic
                    .and_then(|topic| TopicId::from_wire(&topic.topic_id));
                Ok((id, reply.cluster_index))
            }
            // The first attempt made it, or somebody else did: the same, if it has the same shape.
            Err(Refused {
                error,
                doubtful: true,
            }) if error.kind() == ErrorKind::TopicExists
                && self.has_shape(spec, deadline).await? =>
            {
                Ok((None, self.shared.metadata.load().cluster_index))
            }
            Err(Refused { error, .. }) => Err(error.with_topic(&spec.name.as_str().into())),
        }
    }

    /// Raises the number of a topic's partitions to `partitions`. Returns once every partition has
    /// a leader and every broker that answers knows about it. As many as there are already: nothing
    /// is done. The number is never lowered.
    ///
    /// **Keys move**: a key's partition depends on how many there are, so the order of a key's
    /// records holds within each number of partitions only. New partitions start empty; running
    /// producers use them, and consumers of the whole topic read them from their start.
    ///
    /// Retries by itself until the client's call timeout. The number is a target, so a first attempt
    /// whose answer was lost does no harm; and only the topic's incarnation at the time of the call
    /// is meant, never one made since under the same name.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`]; [`ErrorKind::InvalidArgument`] for fewer partitions than there
    /// are or more than there may be; [`ErrorKind::NotEnoughBrokers`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// A dropped call may have added the partitions; calling it again is safe.
    pub async fn add_partitions(&self, name: &str, partitions: u32) -> Result<TopicDescription> {
        check_name(name).map_err(|error| Error::topic_name(&error))?;
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.incarnation(name, deadline).await?;
        let request = v1::AddPartitionsRequest {
            name: name.to_owned(),
            partitions,
            topic_id: topic.id.to_wire(),
        };
        let call =
            async |mut client: ClusterClient<Channel>| client.add_partitions(request.clone()).await;
        let reply = at_controller(&self.shared, deadline, call, |reply| reply.error.as_ref()).await;
        let index = match reply {
            Ok(reply) => reply.cluster_index,
            // An earlier attempt may have added them, and somebody else more.
            Err(Refused {
                error,
                doubtful: true,
            }) if error.kind() == ErrorKind::InvalidArgument
                && self.has_partitions(&topic, partitions, deadline).await? =>
            {
                self.shared.metadata.load().cluster_index
            }
            Err(Refused { error, .. }) => return Err(error.with_topic(&name.into())),
        };
        self.until_usable(name, Some(topic.id), index, deadline)
            .await
    }

    /// Changes settings of a topic: those that are named, and no others. Returns the topic as it is
    /// from then on; every broker goes by it within moments, for what comes next (a smaller
    /// `record_bytes_max` refuses no record that is written already).
    ///
    /// Retries by itself until the client's call timeout. What is asked for twice is done once, and
    /// only the topic's incarnation at the time of the call is meant, never one made since under the
    /// same name.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`]; [`ErrorKind::InvalidArgument`] for a setting that does not exist
    /// or a value that it does not accept (then nothing is changed); [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// A dropped call may have changed the settings; calling it again is safe.
    pub async fn alter_topic(&self, name: &str, changes: TopicChanges) -> Result<TopicDescription> {
        check_name(name).map_err(|error| Error::topic_name(&error))?;
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.incarnation(name, deadline).await?;
        let request = v1::AlterTopicRequest {
            name: name.to_owned(),
            set: changes.set.into_iter().collect(),
            unset: changes.unset.into_iter().collect(),
            topic_id: topic.id.to_wire(),
        };
        let call =
            async |mut client: ClusterClient<Channel>| client.alter_topic(request.clone()).await;
        let altered =
            at_controller(&self.shared, deadline, call, |reply| reply.error.as_ref()).await;
        let reply = altered.map_err(|refused| refused.error.with_topic(&name.into()))?;
        let refreshed = self
            .shared
            .metadata
            .refresh_to(reply.cluster_index, deadline);
        refreshed.await?;
        let view = self.view(vec![name.to_owned()], deadline).await?;
        let mut topics = read_topics(&view)?.into_iter();
        topics.find(|now| now.id == topic.id).ok_or_else(|| {
            let text = "the topic was altered and has been deleted since";
            Error::new(ErrorKind::UnknownTopic, text).with_topic(&name.into())
        })
    }

    /// All topics but those of the cluster itself, by name, without offsets. Retries by itself until
    /// the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn list_topics(&self) -> Result<Vec<TopicDescription>> {
        self.listed(|topic| !topic.internal).await
    }

    /// All topics, those of the cluster itself (`__groups`) too, as [`Client::list_topics`]: for tools
    /// that look after a cluster.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn list_all_topics(&self) -> Result<Vec<TopicDescription>> {
        self.listed(|_| true).await
    }

    async fn listed(
        &self,
        wanted: impl Fn(&v1::TopicInfo) -> bool,
    ) -> Result<Vec<TopicDescription>> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let mut response = self.view(Vec::new(), deadline).await?;
        response.topics.retain(wanted);
        let mut topics = read_topics(&response)?;
        topics.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(topics)
    }

    /// One topic: partitions, leaders, replicas, and offsets where the leader answers within 2 s.
    /// Retries by itself until the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`], [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn describe_topic(&self, name: &str) -> Result<TopicDescription> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        self.shared.metadata.first_view(deadline).await?;
        let known = self.shared.metadata.topic(name, deadline).await?;
        let find = |response: &v1::MetadataResponse| -> Result<Option<TopicDescription>> {
            Ok(read_topics(response)?
                .into_iter()
                .find(|topic| topic.name == name))
        };
        let mut topic = find(&self.view(vec![name.to_owned()], deadline).await?)?;
        if topic.is_none() {
            // Deleted meanwhile, or told by a broker that lags: the controller decides.
            self.shared.metadata.ask_controller(deadline).await?;
            if self.shared.metadata.known_topic(name).is_some() {
                topic = find(&self.view(vec![name.to_owned()], deadline).await?)?;
            }
        }
        let mut topic = topic.ok_or_else(|| {
            Error::new(ErrorKind::UnknownTopic, "the topic does not exist").with_topic(&name.into())
        })?;
        // Leaders that can't be asked leave their offsets open.
        let known = self.shared.metadata.known_topic(name).unwrap_or(known);
        let offsets_deadline = deadline.min(Instant::now() + OFFSETS_TIMEOUT);
        let led = topic.partitions.iter().filter(|p| p.leader.is_some());
        let queries: Vec<_> = led.map(|p| (p.partition, OffsetSpec::End)).collect();
        let listed = list_each_offset(&self.shared, &known, &queries, offsets_deadline).await;
        for listed in listed.into_iter().flatten() {
            let partition = topic
                .partitions
                .iter_mut()
                .find(|p| p.partition == listed.partition);
            if let Some(partition) = partition {
                partition.log_start_offset = Some(listed.log_start_offset);
                partition.high_watermark = Some(listed.high_watermark);
            }
        }
        Ok(topic)
    }

    /// Deletes a topic and its records.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Cancelled, the topic may or may not be deleted; [`Client::describe_topic`] tells.
    pub async fn delete_topic(&self, name: &str) -> Result<()> {
        check_name(name).map_err(|error| Error::topic_name(&error))?;
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.incarnation(name, deadline).await?;
        let request = v1::DeleteTopicRequest {
            name: name.to_owned(),
            topic_id: topic.id.to_wire(),
        };
        let call = |mut client: ClusterClient<Channel>| {
            let request = request.clone();
            async move { client.delete_topic(request).await }
        };
        let index = match at_controller(&self.shared, deadline, call, |r| r.error.as_ref()).await {
            Ok(reply) => reply.cluster_index,
            // An earlier attempt deleted it before its answer was lost.
            Err(Refused {
                error,
                doubtful: true,
            }) if error.kind() == ErrorKind::UnknownTopic => {
                return self.shared.metadata.ask_controller(deadline).await;
            }
            Err(Refused { error, .. }) => return Err(error.with_topic(&name.into())),
        };
        self.shared.metadata.refresh_to(index, deadline).await
    }

    /// Which incarnation a name means now, by the controller's word: what is known here may be an
    /// older one. A change is then for this one only, however often it is asked for (S28).
    async fn incarnation(&self, name: &str, deadline: Instant) -> Result<Arc<Topic>> {
        self.shared.metadata.first_view(deadline).await?;
        self.shared.metadata.ask_controller(deadline).await?;
        self.shared.metadata.known_topic(name).ok_or_else(|| {
            Error::new(ErrorKind::UnknownTopic, "the topic does not exist").with_topic(&name.into())
        })
    }

    /// The view of any broker that is not older than ours (S28).
    async fn view(&self, topics: Vec<String>, deadline: Instant) -> Result<v1::MetadataResponse> {
        self.shared.metadata.view_of_any(topics, deadline).await
    }

    /// Whether this incarnation has so many partitions or more, by the controller's word.
    async fn has_partitions(
        &self,
        topic: &Topic,
        partitions: u32,
        deadline: Instant,
    ) -> Result<bool> {
        self.shared.metadata.ask_controller(deadline).await?;
        Ok(match self.shared.metadata.incarnation(topic) {
            Incarnation::Present(present) => present.partitions() >= partitions,
            Incarnation::Recreated(_) | Incarnation::Missing => false,
        })
    }

    async fn has_shape(&self, spec: &TopicSpec, deadline: Instant) -> Result<bool> {
        self.shared.metadata.ask_controller(deadline).await?;
        let topic = self.shared.metadata.known_topic(&spec.name);
        Ok(topic.is_some_and(|topic| {
            spec.partitions
                .is_none_or(|partitions| partitions == topic.partitions())
        }))
    }

    /// Waits until the topic can be used through every broker that answers, and from this client.
    async fn until_usable(
        &self,
        name: &str,
        id: Option<TopicId>,
        cluster_index: u64,
        deadline: Instant,
    ) -> Result<TopicDescription> {
        let topic = self.until_served(name, id, cluster_index, deadline).await?;
        self.shared
            .metadata
            .refresh_to(cluster_index, deadline)
            .await?;
        // The leaders that the brokers told; their views are older news to the cache at worst.
        let _ = timeout_at(deadline, self.shared.metadata.refresh()).await;
        Ok(topic)
    }

    /// Waits until every broker that answers knows the topic and all its leaders.
    async fn until_served(
        &self,
        name: &str,
        id: Option<TopicId>,
        cluster_index: u64,
        deadline: Instant,
    ) -> Result<TopicDescription> {
        let mut backoff = Backoff::new(&self.shared.config);
        loop {
            let _ = timeout_at(deadline, self.shared.metadata.refresh()).await;
            let endpoints = self.shared.metadata.endpoints();
            let waits = endpoints
                .iter()
                .map(|address| self.served_by(address, name, id, cluster_index, deadline));
            let mut last = None;
            let mut served = None;
            for outcome in join_all(waits).await {
                match outcome {
                    Ok(topic) => served = Some(topic),
                    Err(error) if error.kind() == ErrorKind::Timeout => return Err(error),
                    Err(error) => last = Some(error),
                }
            }
            let until = Instant::now() + backoff.step();
            match (served, last) {
                (Some(topic), _) => return Ok(topic),
                (None, Some(error)) if until >= deadline => return Err(error),
                (None, _) => tokio::time::sleep_until(until).await,
            }
        }
    }

    async fn served_by(
        &self,
        address: &Address,
        name: &str,
        id: Option<TopicId>,
        cluster_index: u64,
        deadline: Instant,
    ) -> Result<TopicDescription> {
        let mut backoff = Backoff::new(&self.shared.config);
        let mut silent_since = Instant::now();
        loop {
            let request = v1::MetadataRequest {
                min_cluster_index: cluster_index,
                topics: vec![name.to_owned()],
                authoritative: false,
            };
            let limit = deadline.min(Instant::now() + SILENT_BROKER);
            let answer = metadata_of(&self.shared, address, request, limit).await;
            match answer {
                Ok(response) => {
                    silent_since = Instant::now();
                    let topics = read_topics(&response)?;
                    let topic = topics.into_iter().find(|topic| topic.name == name);
                    let right = |topic: &TopicDescription| id.is_none_or(|id| id == topic.id);
                    if let Some(topic) = topic.filter(right)
                        && topic.partitions.iter().all(|p| p.leader.is_some())
                    {
                        return Ok(topic);
                    }
                }
                // A broker that is down does not hold up the others.
                Err(error)
                    if error.kind() == ErrorKind::Unreachable
                        || silent_since.elapsed() >= SILENT_BROKER =>
                {
                    let cause = error.message().to_owned();
                    return Err(Error::new(
                        ErrorKind::Unreachable,
                        format!("{address} does not answer: {cause}"),
                    ));
                }
                Err(_) => {}
            }
            let until = Instant::now() + backoff.step();
            if until >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "the topic is decided, but not every partition has a leader yet",
                )
                .with_topic(&name.into()));
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// A refusal by the leader of `__cluster`.
struct Refused {
    error: Error,
    /// An earlier attempt may have gone through.
    doubtful: bool,
}

/// Calls the leader of `__cluster`, found by its hints, until it answers or the deadline passes.
///
/// No `AsyncFn`: with one, the futures of the public calls would not be `Send` for all lifetimes.
async fn at_controller<R, F>(
    shared: &Shared,
    deadline: Instant,
    call: impl Fn(ClusterClient<Channel>) -> F,
    error_of: impl Fn(&R) -> Option<&v1::Error>,
) -> Result<R, Refused>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    let mut doubtful = false;
    let refuse = |error, doubtful| Err(Refused { error, doubtful });
    let timed_out = |route: &ControllerRoute<'_>, doubtful| Refused {
        error: route.timed_out(),
        doubtful,
    };
    if let Err(error) = shared.metadata.first_view(deadline).await {
        return refuse(error, false);
    }
    let mut route = ControllerRoute::new(&shared.metadata);
    loop {
        let address = route.next();
        let ask = async |channel| call(cluster_client(channel)).await;
        let limit = deadline.min(Instant::now() + CHANGE_TIMEOUT);
        let asked = shared.connections.call(&address, Lane::Control, limit, ask);
        match asked.await {
            Ok(reply) => {
                let Some(error) = error_of(&reply) else {
                    return Ok(reply);
                };
                let told = Error::told(error);
                match error.code() {
                    ErrorCode::OutcomeUnknown => doubtful = true,
                    ErrorCode::NotLeader | ErrorCode::NotReady | ErrorCode::Overloaded => {}
                    ErrorCode::UnknownTopic if !error.authoritative => {}
                    _ => return refuse(told, doubtful),
                }
                route.refused(&address, told, error.leader_hint.as_ref());
            }
            Err(CallError { error, unsent }) => {
                doubtful |= !unsent;
                route.refused(&address, error, None);
                if Instant::now() >= deadline {
                    return Err(timed_out(&route, doubtful));
                }
            }
        }
        if route.pause(deadline).await.is_err() {
            return Err(timed_out(&route, doubtful));
        }
    }
}

async fn metadata_of(
    shared: &Shared,
    address: &Address,
    request: v1::MetadataRequest,
    deadline: Instant,
) -> Result<v1::MetadataResponse> {
    let response = shared
        .metadata
        .metadata_of(address, request, deadline)
        .await?;
    match &response.error {
        Some(error) => Err(Error::told(error)),
        None => Ok(response),
    }
}

fn read_topics(response: &v1::MetadataResponse) -> Result<Vec<TopicDescription>> {
    let addresses: HashMap<u64, &str> = response
        .brokers
        .iter()
        .map(|broker| (broker.broker_id, broker.address.as_str()))
        .collect();
    response
        .topics
        .iter()
        .map(|topic| read_topic(topic, &addresses))
        .collect()
}

fn read_topic(topic: &v1::TopicInfo, addresses: &HashMap<u64, &str>) -> Result<TopicDescription> {
    let id = TopicId::from_wire(&topic.topic_id).ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            "the broker's metadata lacks a topic id",
        )
    })?;
    let replica = |replica: &v1::ReplicaInfo| ReplicaDescription {
        broker: BrokerId(replica.broker_id),
        address: addresses
            .get(&replica.broker_id)
            .filter(|address| !address.is_empty())
            .map(|&address| address.to_owned()),
        role: match replica.role() {
            v1::ReplicaRole::Voter => ReplicaRole::Voter,
            v1::ReplicaRole::Learner => ReplicaRole::Learner,
            v1::ReplicaRole::Unspecified => ReplicaRole::Unknown,
        },
    };
    let mut partitions: Vec<_> = topic
        .partitions
        .iter()
        .map(|partition| PartitionDescription {
            partition: partition.partition,
            leader: (partition.leader != 0).then_some(BrokerId(partition.leader)),
            leader_epoch: partition.leader_epoch,
            log_start_offset: None,
            high_watermark: None,
            replicas: partition.replicas.iter().map(replica).collect(),
        })
        .collect();
    partitions.sort_by_key(|partition| partition.partition);
    Ok(TopicDescription {
        name: topic.name.clone(),
        id,
        partitions,
        config: topic.config.clone().into_iter().collect(),
    })
}
