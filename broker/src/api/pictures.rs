//! Pictures of the cluster as clients get them, asked for or pushed.
//!
//! A picture is one [`MetadataResponse`] of everything. Making one takes time and memory with the
//! number of partitions, and each change is pushed to every watcher: so the watchers of a broker
//! share what one of them has made ([`Pictures`]). A watcher costs no task; it makes nothing while
//! its client does not read, and then skips to the newest.
//!
//! Nothing in the pictures of one broker goes back: the view's index only rises, and a partition's
//! leader is the newest that the leader table knows ([`crate::controller::leaders`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ClusterId, PartitionId};
use qute_proto::v1::{
    BrokerInfo, BrokerState, MetadataResponse, PartitionInfo, ReplicaInfo, ReplicaRole, TopicInfo,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::controller::Controller;
use crate::controller::view::{ClusterView, Placement, Topic};
use crate::gossip::Members;

/// Changes that come within this time are pushed as one.
const COALESCE: Duration = Duration::from_millis(20);
/// A picture is shared for this long: connections to other brokers, which it shows, come and go
/// without counting as a change.
const SHARED_FOR: Duration = Duration::from_millis(200);

/// The present state as one message.
pub(super) fn picture(controller: &Controller, topics: &[String]) -> MetadataResponse {
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
pub(super) fn brokers(controller: &Controller, view: &ClusterView) -> Vec<BrokerInfo> {
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

pub(super) fn topic_info(controller: &Controller, topic: &Topic) -> TopicInfo {
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
        internal: topic.is_internal(),
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

/// What a picture is made of, counted.
struct Version {
    index: u64,
    leaders: u64,
    book: u64,
    members: Arc<Members>,
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
            && self.leaders == other.leaders
            && self.book == other.book
            && Arc::ptr_eq(&self.members, &other.members)
    }
}

/// The newest picture, shared by all that want one.
#[derive(Default)]
pub(super) struct Pictures {
    // Held while a picture is made, which takes a millisecond for thousands of partitions; whoever
    // waits would make the same one. Never across an await.
    newest: Mutex<Option<Shared>>,
}

struct Shared {
    version: Version,
    made: Instant,
    picture: Arc<MetadataResponse>,
    #[cfg(test)]
    number: u64,
}

impl Pictures {
    /// A picture that shows all changes up to now.
    fn now(&self, version: impl Fn() -> Version, controller: &Controller) -> Arc<MetadataResponse> {
        let mut newest = self.newest.lock();
        let version = version();
        let shared = newest
            .as_ref()
            .filter(|it| it.version == version && it.made.elapsed() < SHARED_FOR);
        if let Some(shared) = shared {
            return Arc::clone(&shared.picture);
        }
        let picture = Arc::new(picture(controller, &[]));
        #[cfg(test)]
        let number = newest.as_ref().map_or(0, |before| before.number) + 1;
        *newest = Some(Shared {
            version,
            made: Instant::now(),
            picture: Arc::clone(&picture),
            #[cfg(test)]
            number,
        });
        picture
    }

    /// How many were made.
    #[cfg(test)]
    pub(super) fn made(&self) -> u64 {
        self.newest
            .lock()
            .as_ref()
            .map_or(0, |newest| newest.number)
    }
}

/// One client that watches.
pub(super) struct Watcher {
    controller: Controller,
    pictures: Arc<Pictures>,
    stop: CancellationToken,
    view: watch::Receiver<Arc<ClusterView>>,
    members: watch::Receiver<Arc<Members>>,
    leaders: watch::Receiver<u64>,
    book: watch::Receiver<u64>,
    last: Option<Arc<MetadataResponse>>,
}

impl Watcher {
    pub(super) fn new(
        controller: Controller,
        pictures: Arc<Pictures>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            view: controller.watch_view(),
            members: controller.watch_members(),
            leaders: controller.leaders().changes(),
            book: controller.book().changes(),
            controller,
            pictures,
            stop,
            last: None,
        }
    }

    /// The present picture, then one whenever it has changed, until the broker stops.
    pub(super) fn stream(self) -> impl Stream<Item = Result<MetadataResponse, Status>> {
        futures::stream::unfold(self, |mut watcher| async move {
            let stop = watcher.stop.clone();
            tokio::select! {
                picture = watcher.next() => Some((Ok(picture), watcher)),
                () = stop.cancelled() => None,
            }
        })
    }

    async fn next(&mut self) -> MetadataResponse {
        if self.last.is_none() {
            // Nothing is pushed before there is something to say. The sender outlives the service.
            let founded = self.view.wait_for(|view| view.cluster_id.is_some());
            if founded.await.is_err() {
                return std::future::pending().await;
            }
        }
        loop {
            self.view.mark_unchanged();
            self.members.mark_unchanged();
            self.leaders.mark_unchanged();
            self.book.mark_unchanged();
            let now = self.pictures.now(|| self.version(), &self.controller);
            let is_news = self
                .last
                .as_ref()
                .is_none_or(|last| !Arc::ptr_eq(last, &now) && **last != *now);
            if is_news {
                self.last = Some(Arc::clone(&now));
                return MetadataResponse::clone(&now);
            }
            self.changed().await;
            tokio::time::sleep(COALESCE).await;
        }
    }

    fn version(&self) -> Version {
        Version {
            index: self.view.borrow().index,
            leaders: *self.leaders.borrow(),
            book: *self.book.borrow(),
            members: Arc::clone(&self.members.borrow()),
        }
    }

    async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.view.changed() => {}
            Ok(()) = self.members.changed() => {}
            Ok(()) = self.leaders.changed() => {}
            Ok(()) = self.book.changed() => {}
            else => std::future::pending().await,
        }
    }
}
