//! The `Cluster` service of the scripted broker: views, topics, who leads `__cluster`.

use super::*;

#[tonic::async_trait]
impl Cluster for Endpoint {
    type WatchMetadataStream = Boxed<v1::MetadataResponse>;

    async fn hello(
        &self,
        _: Request<v1::HelloRequest>,
    ) -> Result<Response<v1::HelloResponse>, Status> {
        let state = self.fake.state.lock();
        Ok(Response::new(v1::HelloResponse {
            cluster_id: state.cluster_id.to_wire(),
            broker_id: self.broker,
            limits: state.limits,
            ..Default::default()
        }))
    }

    async fn metadata(
        &self,
        request: Request<v1::MetadataRequest>,
    ) -> Result<Response<v1::MetadataResponse>, Status> {
        let request = request.into_inner();
        let delay = {
            let calls = &mut self.fake.state.lock().metadata;
            calls.total += 1;
            if let Some((left @ 1.., code)) = &mut calls.fail {
                *left -= 1;
                return Err(Status::new(*code, "scripted"));
            }
            calls.under_way += 1;
            calls.under_way_max = calls.under_way_max.max(calls.under_way);
            calls.delay
        };
        tokio::time::sleep(delay).await;
        let mut state = self.fake.state.lock();
        state.metadata.under_way -= 1;
        let mut view = state.view_of(self.broker);
        if request.authoritative && state.controller != self.broker {
            view.error = Some(not_leader(state.controller, 1));
        }
        view.authoritative = request.authoritative;
        if !request.topics.is_empty() {
            view.topics
                .retain(|topic| request.topics.contains(&topic.name));
        }
        Ok(Response::new(view))
    }

    async fn watch_metadata(
        &self,
        _: Request<v1::WatchMetadataRequest>,
    ) -> Result<Response<Self::WatchMetadataStream>, Status> {
        let mut changed = self.fake.changed.subscribe();
        let (state, broker) = (Arc::clone(&self.fake.state), self.broker);
        let (views, stream) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let (view, dead) = {
                    let state = state.lock();
                    (state.view_of(broker), state.metadata.watch_is_dead)
                };
                let sent = dead || views.send(Ok(view)).is_ok();
                if !sent || changed.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            stream,
        ))))
    }

    async fn describe_cluster(
        &self,
        _: Request<v1::DescribeClusterRequest>,
    ) -> Result<Response<v1::DescribeClusterResponse>, Status> {
        let state = self.fake.state.lock();
        let view = state.view();
        Ok(Response::new(v1::DescribeClusterResponse {
            cluster_id: view.cluster_id,
            formed: true,
            controller: view.controller,
            founding_brokers: u32::try_from(state.addresses.len()).unwrap(),
            brokers: view.brokers,
            cluster_index: state.cluster_index,
            topics: 1,
            partitions: 1,
            broker_id: self.broker,
            faults: state.faults.get(&self.broker).cloned().unwrap_or_default(),
            time_ms: state.told_ms,
            // A version that doesn't tell.
            storage: None,
            replicas: None,
        }))
    }

    async fn create_topic(
        &self,
        request: Request<v1::CreateTopicRequest>,
    ) -> Result<Response<v1::CreateTopicResponse>, Status> {
        let request = request.into_inner();
        let refuse = |error| {
            Ok(Response::new(v1::CreateTopicResponse {
                error: Some(error),
                ..Default::default()
            }))
        };
        self.fake.change(|state| {
            if state.controller != self.broker {
                return refuse(not_leader(state.controller, 1));
            }
            state.creates += 1;
            if state.topics.contains_key(&request.name) {
                return refuse(error(ErrorCode::TopicExists));
            }
            state.cluster_index += 1;
            let partition = Partition {
                leader: state.created_leader,
                ..Partition::default()
            };
            let topic = (
                TopicId::random(),
                vec![partition; request.partitions.max(1) as usize],
            );
            let info = topic_info(&request.name, &topic);
            state.topics.insert(request.name.clone(), topic);
            if std::mem::take(&mut state.cut_create) {
                return Err(Status::unavailable("cut"));
            }
            Ok(Response::new(v1::CreateTopicResponse {
                topic: Some(info),
                cluster_index: state.cluster_index,
                error: None,
            }))
        })
    }

    async fn add_partitions(
        &self,
        request: Request<v1::AddPartitionsRequest>,
    ) -> Result<Response<v1::AddPartitionsResponse>, Status> {
        let request = request.into_inner();
        let refuse = |error| {
            Ok(Response::new(v1::AddPartitionsResponse {
                error: Some(error),
                ..Default::default()
            }))
        };
        self.fake.change(|state| {
            if state.controller != self.broker {
                return refuse(not_leader(state.controller, 1));
            }
            let topic = state.topics.get_mut(&request.name);
            let same =
                |id: &TopicId| request.topic_id.is_empty() || id.to_wire() == request.topic_id;
            let Some((id, partitions)) = topic.filter(|(id, _)| same(id)) else {
                return refuse(v1::Error {
                    authoritative: true,
                    ..error(ErrorCode::UnknownTopic)
                });
            };
            let wanted = request.partitions as usize;
            if wanted < partitions.len() || wanted > 1024 {
                return refuse(error(ErrorCode::InvalidArgument));
            }
            if wanted > partitions.len() {
                state.cluster_index += 1;
                let leader = partitions.first().map_or((1, 1), |first| first.leader);
                partitions.resize_with(wanted, || Partition {
                    leader,
                    ..Partition::default()
                });
            }
            let info = topic_info(&request.name, &(*id, partitions.clone()));
            if std::mem::take(&mut state.cut_add) {
                let more = partitions.len() + std::mem::take(&mut state.added_elsewhere);
                let leader = partitions.first().map_or((1, 1), |first| first.leader);
                partitions.resize_with(more, || Partition {
                    leader,
                    ..Partition::default()
                });
                return Err(Status::unavailable("cut"));
            }
            Ok(Response::new(v1::AddPartitionsResponse {
                topic: Some(info),
                cluster_index: state.cluster_index,
                error: None,
            }))
        })
    }

    /// Knows the setting `retention_ms` and numbers for it.
    async fn alter_topic(
        &self,
        request: Request<v1::AlterTopicRequest>,
    ) -> Result<Response<v1::AlterTopicResponse>, Status> {
        let request = request.into_inner();
        let refuse = |error| {
            Ok(Response::new(v1::AlterTopicResponse {
                error: Some(error),
                ..Default::default()
            }))
        };
        self.fake.change(|state| {
            if state.controller != self.broker {
                return refuse(not_leader(state.controller, 1));
            }
            let topic = state.topics.get(&request.name).cloned();
            let Some(topic) = topic.filter(|(id, _)| id.to_wire() == request.topic_id) else {
                return refuse(v1::Error {
                    authoritative: true,
                    ..error(ErrorCode::UnknownTopic)
                });
            };
            let known = |key: &String| key == "retention_ms";
            let accepted = request
                .set
                .values()
                .all(|value| value.parse::<u64>().is_ok());
            let mut keys = request.set.keys().chain(&request.unset);
            if !accepted || !keys.all(known) {
                return refuse(error(ErrorCode::InvalidArgument));
            }
            state.cluster_index += 1;
            let config = state.configs.entry(request.name.clone()).or_default();
            config.extend(request.set);
            config.retain(|key, _| !request.unset.contains(key));
            if std::mem::take(&mut state.cut_alter) {
                return Err(Status::unavailable("cut"));
            }
            Ok(Response::new(v1::AlterTopicResponse {
                topic: Some(topic_info(&request.name, &topic)),
                cluster_index: state.cluster_index,
                error: None,
            }))
        })
    }

    async fn delete_topic(
        &self,
        request: Request<v1::DeleteTopicRequest>,
    ) -> Result<Response<v1::DeleteTopicResponse>, Status> {
        let v1::DeleteTopicRequest { name, topic_id } = request.into_inner();
        let successor = self.fake.state.lock().deposed_on_delete.take();
        if let Some(successor) = successor {
            self.fake.change(|state| state.controller = successor);
            std::future::pending::<()>().await;
        }
        self.fake.change(|state| {
            state.cluster_index += 1;
            let wanted = |id: &TopicId| topic_id.is_empty() || id.to_wire() == topic_id;
            let found = state.topics.get(&name).is_some_and(|(id, _)| wanted(id));
            let gone = found.then(|| state.topics.remove(&name)).flatten();
            if let Some((_, partitions)) = &gone
                && std::mem::take(&mut state.recreate_after_delete)
            {
                let again = (TopicId::random(), partitions.clone());
                state.topics.insert(name, again);
                return Err(Status::unavailable("cut"));
            }
            let error = gone.is_none().then(|| v1::Error {
                authoritative: true,
                ..error(ErrorCode::UnknownTopic)
            });
            Ok(Response::new(v1::DeleteTopicResponse {
                cluster_index: state.cluster_index,
                error,
            }))
        })
    }
}
