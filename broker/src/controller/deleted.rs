//! Topics that are known to be gone for good.
//!
//! A topic id is never used again, so once a committed deletion has been seen the word of any
//! broker on it is final. This broker remembers the ids that it has seen go (with the name, so that
//! whoever still writes to one learns that the topic was made again) and those that tombstones
//! name. What it has forgotten, or missed, only the leader of `__cluster` can tell.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use qute_proto::ids::TopicId;

use super::view::ClusterView;

/// Deleted topics remembered.
const REMEMBERED_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Memory {
    last: Option<Arc<ClusterView>>,
    /// By id: the name, where it was seen.
    gone: HashMap<TopicId, Option<String>>,
    /// The oldest first.
    order: VecDeque<TopicId>,
}

impl Memory {
    fn remember(&mut self, id: TopicId, name: Option<String>) {
        if self.gone.contains_key(&id) {
            return;
        }
        self.gone.insert(id, name);
        self.order.push_back(id);
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.gone.remove(&oldest);
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct DeletedTopics {
    // Short: look-ups and inserts only, never across an await.
    memory: Mutex<Memory>,
}

impl DeletedTopics {
    /// Takes in the next view.
    pub fn learn(&self, view: &Arc<ClusterView>) {
        let mut memory = self.memory.lock();
        let last = memory.last.replace(Arc::clone(view));
        let topics = last.iter().flat_map(|last| last.topics_by_id.values());
        for topic in topics.filter(|topic| !view.topics_by_id.contains_key(&topic.id)) {
            memory.remember(topic.id, Some(topic.name.clone()));
        }
        for tombstone in view.tombstones.values() {
            let id = tombstone.partition.topic;
            // A replica that has moved leaves one, too.
            if !view.topics_by_id.contains_key(&id) {
                memory.remember(id, None);
            }
        }
    }

    /// `None`: not known to be deleted. Else the name it had, where that was seen.
    #[must_use]
    pub fn get(&self, id: TopicId) -> Option<Option<String>> {
        self.memory.lock().gone.get(&id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::{BrokerId, PartitionId, ReplicaId};

    use super::*;
    use crate::controller::settings::TopicSettings;
    use crate::controller::view::{Tombstone, Topic};

    fn view(topics: &[(u128, &str)]) -> Arc<ClusterView> {
        let mut view = ClusterView::default();
        for (id, name) in topics {
            let topic = Arc::new(Topic {
                name: (*name).to_owned(),
                id: TopicId(uuid::Uuid::from_u128(*id)),
                config: std::collections::BTreeMap::new(),
                settings: TopicSettings::from_config(&std::collections::BTreeMap::new()),
                partitions: Vec::new(),
            });
            view.topics_by_id.insert(topic.id, Arc::clone(&topic));
            view.topics.insert(topic.name.clone(), topic);
        }
        Arc::new(view)
    }

    fn id(n: u128) -> TopicId {
        TopicId(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn topic_that_left_the_view_is_known_with_its_name_and_others_are_not() {
        let deleted = DeletedTopics::default();
        deleted.learn(&view(&[(1, "a"), (2, "b")]));
        assert_eq!(deleted.get(id(1)), None);
        deleted.learn(&view(&[(2, "b"), (3, "a")]));
        assert_eq!(deleted.get(id(1)), Some(Some("a".to_owned())));
        assert_eq!(deleted.get(id(2)), None);
        assert_eq!(deleted.get(id(9)), None);
    }

    #[test]
    fn tombstones_name_topics_deleted_before_the_start() {
        let mut now = ClusterView::clone(&view(&[(2, "b")]));
        for (replica, topic) in [(7, 1), (8, 2)] {
            let tombstone = Tombstone {
                partition: PartitionId {
                    topic: id(topic),
                    partition: 0,
                },
                replica: ReplicaId(replica),
                broker: BrokerId(1),
            };
            now.tombstones.insert(tombstone.replica, tombstone);
        }
        let deleted = DeletedTopics::default();
        deleted.learn(&Arc::new(now));
        assert_eq!(deleted.get(id(1)), Some(None));
        // Only a replica of it has gone.
        assert_eq!(deleted.get(id(2)), None);
    }

    #[test]
    fn memory_is_bounded_and_forgets_the_oldest() {
        let deleted = DeletedTopics::default();
        for n in 0..=5000 {
            deleted.learn(&view(&[(n, "t")]));
        }
        assert_eq!(deleted.get(id(0)), None);
        assert_eq!(deleted.get(id(4999)), Some(Some("t".to_owned())));
        assert_eq!(deleted.memory.lock().gone.len(), REMEMBERED_MAX);
    }
}
