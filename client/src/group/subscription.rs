//! Which topics a member reads: names and patterns, resolved against views of the cluster. Pure.
//!
//! ```text
//!   names, patterns --.
//!                     +--> [Subscription] --> what to tell the coordinator, and what has changed
//!   view -------------'
//! ```
//!
//! A view is the whole truth at its index and never goes back (S28), so a topic that is not in it does
//! not exist there: one not made yet is waited for, one deleted is given up. A topic made anew under the
//! name is another one, of which nothing has been committed. Topics of the cluster itself never match.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use qute_proto::ids::TopicId;
use qute_proto::v1;
use regex::{Regex, RegexBuilder};

use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{Metadata, Topic};

/// Of a pattern, and of what it is compiled to.
const PATTERN_BYTES_MAX: usize = 4096;
const COMPILED_BYTES_MAX: usize = 1024 * 1024;

/// What a program asked for.
#[derive(Debug, Clone, Default)]
pub(super) struct Selection {
    names: BTreeSet<Arc<str>>,
    patterns: Vec<Regex>,
}

impl Selection {
    /// Also this topic, now or once it is made.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidTopicName`].
    pub(super) fn name(&mut self, name: &str) -> Result<()> {
        qute_proto::topic::check_name(name).map_err(|error| Error::topic_name(&error))?;
        self.names.insert(name.into());
        Ok(())
    }

    /// Also all topics that the regular expression matches somewhere.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with what is wrong with it.
    pub(super) fn pattern(&mut self, pattern: &str) -> Result<()> {
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("the pattern is longer than {PATTERN_BYTES_MAX} bytes"),
            ));
        }
        let compiled = RegexBuilder::new(pattern)
            .size_limit(COMPILED_BYTES_MAX)
            .build()
            .map_err(|error| {
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!("no regular expression of topic names: {error}"),
                )
                .with_cause(&error)
            })?;
        self.patterns.push(compiled);
        Ok(())
    }

    /// Whether nothing was asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.patterns.is_empty()
    }

    fn wants(&self, topic: &Topic) -> bool {
        let named = || self.names.contains(&topic.name);
        let matched = || self.patterns.iter().any(|it| it.is_match(&topic.name));
        !topic.internal && topic.partitions() > 0 && (named() || matched())
    }
}

/// A topic that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SubscribedTopic {
    pub(super) name: Arc<str>,
    pub(super) partitions: u32,
}

/// What a view has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// A topic is read from now on.
    Appeared { id: TopicId, name: Arc<str> },
    /// It has more partitions.
    Grew { id: TopicId, from: u32, to: u32 },
    /// It is gone.
    Deleted { id: TopicId, name: Arc<str> },
    /// It is gone, and another one in its place, which is read from now on.
    Recreated {
        name: Arc<str>,
        old: TopicId,
        new: TopicId,
    },
}

/// The topics that a member reads, by the latest view.
#[derive(Debug, Clone)]
pub(super) struct Subscription {
    selection: Selection,
    topics: BTreeMap<TopicId, SubscribedTopic>,
}

impl Subscription {
    /// Nothing is known yet.
    pub(super) fn new(selection: Selection) -> Self {
        Self {
            selection,
            topics: BTreeMap::new(),
        }
    }

    /// Takes in a view: what has changed, by name. A view from before there is a cluster changes nothing.
    pub(super) fn update(&mut self, view: &Metadata) -> Vec<Change> {
        if view.cluster_id.is_none() {
            return Vec::new();
        }
        let mut changes = Vec::new();
        let mut gone = std::mem::take(&mut self.topics);
        let by_name: BTreeMap<Arc<str>, TopicId> = gone
            .iter()
            .map(|(&id, topic)| (Arc::clone(&topic.name), id))
            .collect();
        for topic in view.topics.values().filter(|it| self.selection.wants(it)) {
            let (id, name) = (topic.id, Arc::clone(&topic.name));
            let mut partitions = topic.partitions();
            if let Some(known) = gone.remove(&id) {
                // Partitions are never taken away.
                partitions = partitions.max(known.partitions);
                if partitions > known.partitions {
                    let (from, to) = (known.partitions, partitions);
                    changes.push(Change::Grew { id, from, to });
                }
            } else if let Some(&old) = by_name.get(&name) {
                gone.remove(&old);
                let (name, new) = (Arc::clone(&name), id);
                changes.push(Change::Recreated { name, old, new });
            } else {
                let name = Arc::clone(&name);
                changes.push(Change::Appeared { id, name });
            }
            self.topics.insert(id, SubscribedTopic { name, partitions });
        }
        let deleted = gone.into_iter().map(|(id, topic)| Change::Deleted {
            id,
            name: topic.name,
        });
        changes.extend(deleted);
        changes
    }

    /// The topics that are read, by id.
    pub(super) fn topics(&self) -> &BTreeMap<TopicId, SubscribedTopic> {
        &self.topics
    }

    /// Topics that were asked for by name and are not there.
    pub(super) fn missing(&self) -> impl Iterator<Item = &Arc<str>> {
        let there = |name: &Arc<str>| self.topics.values().any(|topic| topic.name == *name);
        let names = self.selection.names.iter();
        names.filter(move |name| !there(name))
    }

    /// What to tell the coordinator.
    pub(super) fn to_wire(&self) -> Vec<v1::TopicSubscription> {
        let tell = |(id, topic): (&TopicId, &SubscribedTopic)| v1::TopicSubscription {
            topic_id: id.to_wire(),
            partitions: topic.partitions,
        };
        self.topics.iter().map(tell).collect()
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::ClusterId;

    use super::*;

    fn id(n: u128) -> TopicId {
        TopicId(uuid::Uuid::from_u128(n))
    }

    /// Name, id, partitions; names that begin with `__` are the cluster's own.
    fn view(topics: &[(&str, u128, usize)]) -> Metadata {
        let topic = |&(name, n, partitions): &(&str, u128, usize)| {
            let topic = Topic {
                name: name.into(),
                id: id(n),
                internal: name.starts_with("__"),
                leaders: vec![None; partitions],
                voters: vec![Vec::new(); partitions],
            };
            (Arc::from(name), Arc::new(topic))
        };
        Metadata {
            cluster_id: Some(ClusterId(uuid::Uuid::from_u128(7))),
            topics: topics.iter().map(topic).collect(),
            ..Metadata::default()
        }
    }

    fn subscription(names: &[&str], patterns: &[&str]) -> Subscription {
        let mut selection = Selection::default();
        for name in names {
            selection.name(name).unwrap();
        }
        for pattern in patterns {
            selection.pattern(pattern).unwrap();
        }
        Subscription::new(selection)
    }

    fn read(subscription: &Subscription) -> Vec<(&str, u32)> {
        let topics = subscription.topics().values();
        topics.map(|it| (&*it.name, it.partitions)).collect()
    }

    #[test]
    fn topic_by_name_appears_grows_is_deleted_and_made_again() {
        let mut orders = subscription(&["orders"], &[]);
        assert_eq!(orders.update(&view(&[("other", 1, 1)])), []);
        assert_eq!(orders.missing().count(), 1);
        let appeared = orders.update(&view(&[("orders", 2, 3), ("other", 1, 1)]));
        let name: Arc<str> = "orders".into();
        let named = || Arc::clone(&name);
        assert_eq!(
            appeared,
            [Change::Appeared {
                id: id(2),
                name: named()
            }]
        );
        assert_eq!(orders.update(&view(&[("orders", 2, 3)])), []);
        assert_eq!(
            orders.update(&view(&[("orders", 2, 5)])),
            [Change::Grew {
                id: id(2),
                from: 3,
                to: 5
            }]
        );
        assert_eq!(read(&orders), [("orders", 5)]);
        assert_eq!(orders.missing().count(), 0);
        assert_eq!(
            orders.update(&view(&[("orders", 9, 1)])),
            [Change::Recreated {
                name: named(),
                old: id(2),
                new: id(9)
            }]
        );
        assert_eq!(orders.to_wire().len(), 1);
        assert_eq!(
            orders.update(&view(&[])),
            [Change::Deleted {
                id: id(9),
                name: named()
            }]
        );
        assert_eq!(orders.to_wire(), []);
    }

    #[test]
    fn topics_by_pattern_are_those_that_match_and_never_internal_ones() {
        let mut all = subscription(&[], &[".*"]);
        let mut orders = subscription(&["refunds"], &["^orders\\."]);
        let topics = [
            ("__groups", 1, 16),
            ("orders.eu", 2, 1),
            ("orders.us", 3, 1),
            ("pre-orders.eu", 4, 1),
            ("refunds", 5, 1),
        ];
        all.update(&view(&topics));
        assert_eq!(read(&all).len(), 4);
        assert!(read(&all).iter().all(|(name, _)| !name.starts_with("__")));
        orders.update(&view(&topics));
        assert_eq!(
            read(&orders),
            [("orders.eu", 1), ("orders.us", 1), ("refunds", 1)]
        );
    }

    #[test]
    fn view_from_before_there_is_a_cluster_deletes_nothing() {
        let mut all = subscription(&[], &["."]);
        all.update(&view(&[("a", 1, 1)]));
        assert_eq!(all.update(&Metadata::default()), []);
        assert_eq!(read(&all), [("a", 1)]);
    }

    #[test]
    fn partitions_are_never_fewer_than_were_known() {
        let mut all = subscription(&["a"], &[]);
        all.update(&view(&[("a", 1, 4)]));
        assert_eq!(all.update(&view(&[("a", 1, 2)])), []);
        assert_eq!(read(&all), [("a", 4)]);
    }

    #[test]
    fn selection_that_makes_no_sense_is_refused_with_what_is_wrong() {
        let mut selection = Selection::default();
        assert!(selection.is_empty());
        let name = selection.name("a/b").unwrap_err();
        assert_eq!(name.kind(), ErrorKind::InvalidTopicName);
        assert!(selection.name("__groups").is_err());
        for bad in ["(", &"x".repeat(5000), "(a{1000}){1000}"] {
            let error = selection.pattern(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        assert!(selection.is_empty());
    }
}
