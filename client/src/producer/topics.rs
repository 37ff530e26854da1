//! The partitions of each topic incarnation that a producer writes to: their queues, each with its
//! driver, and where the keyless records of the topic go.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use qute_proto::ids::TopicId;
use qute_proto::partition::partition_of;
use tokio::time::Instant;

use super::adaptive::{Adaptive, repels};
use super::driver::Driver;
use super::intake::Inner;
use super::load::{LoadCell, PartitionLoad};
use super::partitioner::TopicLoad;
use super::queue::PartitionQueue;
use super::report::Place;
use super::room::Room;
use crate::admin::unknown_partition;
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Topic;
use crate::record::Record;

/// By incarnation: a name may stand for two of them while views change, and each partition of each
/// must have exactly one driver (S12: two would count the same sequences).
#[derive(Default)]
pub(super) struct Topics {
    by_id: RwLock<HashMap<TopicId, Arc<TopicQueues>>>,
}

/// The queues of one incarnation of a topic.
pub(super) struct TopicQueues {
    /// As it was when first written to: partitions may have been added since.
    topic: Arc<Topic>,
    /// By partition; made when first used.
    queues: RwLock<Vec<Option<Arc<PartitionQueue>>>>,
    adaptive: Mutex<Adaptive>,
}

/// Where a record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) partition: u32,
    /// Any other partition would do.
    pub(super) free: bool,
}

impl Topics {
    /// The queues of this incarnation. Those of an older one are left to their drivers, which find
    /// out that it is gone, and are dropped once nothing can come from them any more.
    pub(super) fn of(&self, topic: &Arc<Topic>, batch_bytes: usize) -> Arc<TopicQueues> {
        if let Some(queues) = self.by_id.read().get(&topic.id) {
            return Arc::clone(queues);
        }
        let mut by_id = self.by_id.write();
        if let Some(queues) = by_id.get(&topic.id) {
            return Arc::clone(queues);
        }
        // Held by the map alone, nobody can be about to use it.
        by_id.retain(|_, queues| Arc::strong_count(queues) > 1 || !queues.are_closed());
        let older = by_id
            .values()
            .filter(|queues| queues.topic.name == topic.name);
        for queue in older.flat_map(|queues| queues.all()) {
            queue.retire();
        }
        let queues = Arc::new(TopicQueues {
            topic: Arc::clone(topic),
            queues: RwLock::default(),
            adaptive: Mutex::new(Adaptive::new(batch_bytes)),
        });
        by_id.insert(topic.id, Arc::clone(&queues));
        queues
    }

    pub(super) fn all_queues(&self) -> Vec<Arc<PartitionQueue>> {
        let by_id = self.by_id.read();
        by_id.values().flat_map(|queues| queues.all()).collect()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<u128> {
        let mut ids: Vec<u128> = self.by_id.read().keys().map(|id| id.0.as_u128()).collect();
        ids.sort_unstable();
        ids
    }
}

impl TopicQueues {
    /// The partition's queue, with its driver running.
    pub(super) fn queue(&self, producer: &Inner, partition: u32) -> Result<Arc<PartitionQueue>> {
        let at = usize::try_from(partition).unwrap_or(usize::MAX);
        if let Some(Some(queue)) = self.queues.read().get(at) {
            return Ok(Arc::clone(queue));
        }
        let mut queues = self.queues.write();
        if queues.len() <= at {
            queues.resize(at + 1, None);
        }
        let Some(slot) = queues.get_mut(at) else {
            return Err(unknown_partition(&self.topic, partition));
        };
        if let Some(queue) = slot {
            return Ok(Arc::clone(queue));
        }
        if producer.is_closed() {
            return Err(Error::closed("producer"));
        }
        let place = Place {
            topic: Arc::clone(&self.topic.name),
            partition,
        };
        let room = Room::new(producer.budget.share(), LoadCell::new(Instant::now()));
        let queue = Arc::new(PartitionQueue::new(
            place,
            &producer.config,
            Arc::clone(&producer.shared.connections),
            Arc::new(room),
            Arc::clone(&producer.tally),
        ));
        let driver = Driver::new(
            Arc::clone(&producer.shared),
            Arc::clone(&producer.links),
            Arc::clone(&self.topic),
            Arc::clone(&queue),
            producer.producer_id,
            &producer.config,
        );
        producer.tasks.spawn(driver.run(producer.stop.clone()));
        Ok(Arc::clone(slot.insert(queue)))
    }

    /// Where the record goes, `topic` being the newest view of this incarnation: the number of
    /// partitions is the present one, and never depends on their health.
    pub(super) fn target(
        &self,
        producer: &Inner,
        topic: &Topic,
        record: &Record,
        bytes: usize,
    ) -> Result<Target> {
        let fixed = |partition| {
            let target = Target {
                partition,
                free: false,
            };
            let known = partition < topic.partitions();
            known
                .then_some(target)
                .ok_or_else(|| unknown_partition(topic, partition))
        };
        if let Some(partition) = record.partition {
            return fixed(partition);
        }
        if let Some(partitioner) = &producer.config.partitioner.0 {
            let now = Instant::now();
            let load = |partition| self.load_now(producer, topic, partition, now);
            let choice = partitioner.partition(record, &TopicLoad::new(topic.partitions(), &load));
            if let Some(partition) = choice {
                return fixed(partition);
            }
        }
        if let Some(key) = &record.key {
            return fixed(partition_of(key, topic.partitions()));
        }
        let now = Instant::now();
        let present = |partition| self.load(topic, partition, now);
        let load = |partition| self.load_now(producer, topic, partition, now);
        let (count, mut rng) = (topic.partitions(), rand::rng());
        let mut adaptive = self.adaptive.lock();
        Ok(Target {
            partition: adaptive.pick(count, bytes, now, &mut rng, present, load),
            free: true,
        })
    }

    /// Another partition for a record that any would do for, since the last one has no room.
    pub(super) fn other_target(&self, producer: &Inner, topic: &Topic) -> u32 {
        let now = Instant::now();
        let load = |partition| self.load_now(producer, topic, partition, now);
        let mut adaptive = self.adaptive.lock();
        adaptive.pick_other(topic.partitions(), now, &mut rand::rng(), load)
    }

    /// Where a record goes that waits for a partition without being bound to it: `None` while that
    /// one is well (its turn there comes), or none is better.
    pub(super) fn refuge(&self, producer: &Inner, topic: &Topic, partition: u32) -> Option<u32> {
        let is_well = |partition| {
            let load = self.load_now(producer, topic, partition, Instant::now());
            !repels(&load)
        };
        if is_well(partition) {
            return None;
        }
        let other = self.other_target(producer, topic);
        is_well(other).then_some(other)
    }

    /// The partition's load; one whose leader's breaker is open takes nothing.
    fn load_now(
        &self,
        producer: &Inner,
        topic: &Topic,
        partition: u32,
        now: Instant,
    ) -> PartitionLoad {
        let mut load = self.load(topic, partition, now);
        if load.available
            && let Some(leader) = topic.leader(partition)
            && let Some(address) = producer.shared.metadata.load().address(leader.broker)
        {
            let connections = &producer.shared.connections;
            load.available =
                connections.refused_until(address).is_none() || producer.links.is_alive(address);
        }
        load
    }

    /// The same by what its own traffic shows: cheap enough for every record.
    fn load(&self, topic: &Topic, partition: u32, now: Instant) -> PartitionLoad {
        let has_leader = topic.leader(partition).is_some();
        let at = usize::try_from(partition).unwrap_or(usize::MAX);
        match self.queues.read().get(at) {
            Some(Some(queue)) => queue.room.load.read(has_leader, now),
            _ => PartitionLoad::untried(has_leader),
        }
    }

    fn all(&self) -> Vec<Arc<PartitionQueue>> {
        self.queues.read().iter().flatten().cloned().collect()
    }

    /// The drivers have ended, since the topic is gone. One that ended with its runtime is not to have
    /// a successor, which would count the same sequences anew (S12).
    fn are_closed(&self) -> bool {
        let is_gone = |error: Error| error.kind() != ErrorKind::Closed;
        self.all()
            .iter()
            .all(|queue| queue.closed().is_some_and(is_gone))
    }
}
