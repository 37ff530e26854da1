//! `consume -g`: as a member of a consumer group. What is written to standard output is acknowledged,
//! what is acknowledged is committed; nothing else is.
//!
//! `-e` ends once the member has read what it claims to the ends that were there when it claimed it,
//! and the group has settled: a partition that another member is still giving up counts, too.

use std::fmt::Display;
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _};
use qute_client::group::{
    Acker, Event, GroupBatch, GroupConsumer, GroupPartition, GroupState, LostReason, TopicPartition,
};
use qute_client::{Client, ErrorKind, OutOfRange};

use super::ends::Ends;
use super::outlet::Receipt;
use super::session::{Item, Source};
use super::start;
use crate::args::{Consume, Global};
use crate::connection::{connect, explain};
use crate::exit::Failure;
use crate::output::say;

/// With `-e`: how often it is looked whether the member is through, while nothing comes.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the coordinator may take to confirm the last commits and the leaving.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// A member of a group.
pub struct Group {
    client: Client,
    consumer: GroupConsumer,
    /// With `-e`.
    ends: Option<Ends>,
    /// Says what happens to partitions.
    talks: bool,
    /// The command has failed: its members' end is no news.
    over: bool,
}

/// What was printed of one batch.
pub struct Printed(Acker);

impl Receipt for Printed {
    fn written(self, through: u64) {
        // A partition that is another's by now is read again there: nothing to do.
        self.0.ack_through(through);
    }
}

/// Joins the group.
///
/// # Errors
/// An unknown topic, a name or an expression that makes no sense, no coordinator until the deadline.
pub async fn join(group: &str, args: &Consume, global: &Global) -> Result<Group, Failure> {
    let client = connect(global).await?;
    let mut member = client
        .group(group)
        .start(start(args.offset))
        .out_of_range(OutOfRange::ToStart);
    if let Some(instance) = &args.instance {
        member = member.instance(instance);
    }
    let joined = async {
        let member = match args.regex {
            true => member.topics_matching(&args.topic)?,
            false => member.topics([&args.topic]),
        };
        member.join().await
    };
    let consumer = match joined.await {
        Ok(consumer) => consumer,
        Err(error) => return Err(explain(&client, &error).await),
    };
    if global.verbose > 0 {
        say(format_args!(
            "joined group {group} as member {}",
            consumer.member()
        ));
    }
    let ends = args.end.then(|| Ends::new(global.delivery_timeout()));
    Ok(Group {
        client,
        consumer,
        ends,
        talks: global.verbose > 0,
        over: false,
    })
}

impl Group {
    /// Commits what was written and leaves; a static member keeps its place for its successor.
    ///
    /// # Errors
    /// The coordinator has not confirmed it: what was printed last may come again.
    pub async fn leave(self) -> Result<(), Failure> {
        let name = self.consumer.group().to_owned();
        match self.consumer.leave(LEAVE_LIMIT).await {
            Ok(()) => Ok(()),
            // The session was over before: it has been told, and said.
            Err(error) if error.kind() == ErrorKind::UnknownMember => Ok(()),
            Err(error) => Err(Failure::error(format!(
                "leaving group {name}: {error}; what was printed last may come again"
            ))),
        }
    }

    /// What an event means here; `None`: nothing to print.
    fn take(&mut self, event: Event) -> Option<Item<Printed>> {
        let control = self.consumer.control();
        if let Some(ends) = &mut self.ends {
            ends.follow(&event, &control);
        }
        match event {
            Event::Batch(batch) => match &mut self.ends {
                Some(ends) => ends.admit(batch).map(|batch| self.hand_over(batch)),
                None => Some(self.hand_over(batch)),
            },
            Event::Failed(error) if error.kind() == ErrorKind::ProcessingLimit => {
                say("note: standard output took nothing for too long; joining the group again");
                None
            }
            // What it has flows on.
            Event::Failed(error) if error.kind() == ErrorKind::NotAssigned => {
                say(format_args!("note: {error}"));
                None
            }
            Event::Failed(error) => Some(Item::Fault(error)),
            Event::Assigned(assigned) => {
                self.talk("reads", &assigned.partitions);
                None
            }
            Event::Revoking(revoking) => {
                self.talk("gives up", &revoking.partitions);
                None
            }
            Event::Lost(lost) => {
                let why = match lost.reason {
                    LostReason::SessionExpired => "the coordinator was out of reach for too long",
                    LostReason::Fenced => "they are claimed anew",
                    LostReason::RevokeTimeout => "they were not given up in time",
                    _ => "they were taken away",
                };
                say(format_args!(
                    "note: lost {}: {why}; what was not committed is read again",
                    listed(&lost.partitions)
                ));
                None
            }
            Event::Reset { error, to, .. } => {
                say(format_args!("note: {error}; reading on at {to}"));
                None
            }
            Event::TopicRecreated { topic, .. } => {
                say(format_args!(
                    "note: topic {topic} was deleted and made again; reading the new one from its start"
                ));
                None
            }
            _ => None,
        }
    }

    fn hand_over(&mut self, batch: GroupBatch) -> Item<Printed> {
        let (acker, partition) = (batch.acker(), batch.topic_partition());
        let mut records = batch.into_records();
        if let Some(ends) = &mut self.ends {
            ends.cut(&partition, &mut records, &self.consumer.control());
        }
        Item::Records(records, Printed(acker))
    }

    fn talk(&self, what: &str, partitions: &[TopicPartition]) {
        if self.talks {
            let member = self.consumer.member();
            say(format_args!(
                "member {member} {what} {}",
                listed(partitions)
            ));
        }
    }

    /// Whether this member has all that the group means it to have, and has been told so.
    async fn has_settled(&self) -> bool {
        let Some(ends) = &self.ends else {
            return false;
        };
        let groups = self.client.groups();
        let Ok(described) = groups.describe(self.consumer.group()).await else {
            return false;
        };
        let me = self.consumer.member();
        let me = described.members.iter().find(|member| member.id == me);
        let told = |partition: &GroupPartition| {
            partition.topic.as_ref().is_none_or(|topic| {
                ends.has_seen(&TopicPartition::new(topic.clone(), partition.partition))
            })
        };
        described.listing.state == GroupState::Stable
            && me.is_some_and(|me| me.targets.iter().all(told))
    }

    /// With `-e`: one event, or `None` after a while without any.
    async fn bounded_event(&mut self) -> Option<Option<Event>> {
        let Some(ends) = &mut self.ends else {
            return Some(self.consumer.next().await);
        };
        let control = self.consumer.control();
        ends.recheck(&control);
        tokio::select! {
            biased;
            event = self.consumer.next() => Some(event),
            () = ends.measure(&self.client, &control) => None,
            () = tokio::time::sleep(LOOK_EVERY) => None,
        }
    }
}

impl Source for Group {
    type Receipt = Printed;

    fn ready(&mut self) -> Option<Option<Item<Printed>>> {
        if self.ends.as_ref().is_some_and(Ends::is_to_be_looked_after) {
            return None;
        }
        loop {
            match self.consumer.next().now_or_never()? {
                None => return Some(None),
                Some(event) => {
                    if let Some(item) = self.take(event) {
                        return Some(Some(item));
                    }
                    if self.ends.is_some() {
                        return None;
                    }
                }
            }
        }
    }

    async fn next(&mut self) -> Option<Item<Printed>> {
        loop {
            if self.over {
                return None;
            }
            if let Some(batch) = self.ends.as_mut().and_then(Ends::next_admitted) {
                return Some(self.hand_over(batch));
            }
            if self.ends.as_ref().is_some_and(Ends::are_reached) && self.has_settled().await {
                return None;
            }
            if let Some(stalled) = self.ends.as_ref().and_then(Ends::stalled) {
                self.over = true;
                return Some(Item::Failed(stalled));
            }
            if let Some(event) = self.bounded_event().await
                && let Some(item) = self.take(event?)
            {
                return Some(item);
            }
        }
    }
}

pub(super) fn listed<T: Display>(partitions: impl IntoIterator<Item = T>) -> String {
    let names = partitions.into_iter().map(|it| it.to_string());
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_listed_by_their_names() {
        let partitions = [TopicPartition::new("a", 0), TopicPartition::new("b", 12)];
        assert_eq!(listed(&partitions), "a/0, b/12");
        assert_eq!(listed(Vec::<TopicPartition>::new()), "");
    }
}
