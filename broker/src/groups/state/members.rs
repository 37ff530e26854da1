//! Members of a group and their seats.
//!
//! A seat is a small number that a member keeps while it is a member; claims and targets name seats,
//! which keeps them small, and a successor under a stable name simply sits down on the seat. Seats
//! of members that have gone are given out again, so they mean nothing outside of one state: a
//! checkpoint names members by their order of joining.

use std::num::NonZeroU16;

use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::{self, AssignorVersion, ErrorCode};

use super::command::{Refusal, refuse};

/// The place of a member within its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat(NonZeroU16);

impl Seat {
    fn from_index(index: usize) -> Option<Self> {
        let number = u16::try_from(index.checked_add(1)?).ok()?;
        NonZeroU16::new(number).map(Self)
    }

    pub(super) fn index(self) -> usize {
        usize::from(self.0.get()) - 1
    }
}

/// What a member reads, and how many partitions that has as far as it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subscription {
    /// The topic incarnation.
    pub topic: TopicId,
    /// Partitions are numbered below this.
    pub partitions: u32,
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Chosen by itself.
    pub id: MemberId,
    /// Rises each time it joins after having lost its session.
    pub epoch: u64,
    /// Its stable name, or empty.
    pub instance: Box<str>,
    /// Where it runs, or empty.
    pub rack: Box<str>,
    /// For people.
    pub client: Box<str>,
    /// What it can compute assignments with, the best first.
    pub assignors: Vec<AssignorVersion>,
    /// By topic id, each once.
    pub topics: Vec<Subscription>,
    /// As it asked for.
    pub session_timeout_ms: u32,
    /// The group's revision at which something that concerns this member changed last.
    pub revision: u64,
}

impl Member {
    /// Reads a join.
    pub(in crate::groups) fn from_join(join: &v1::Join) -> Result<Self, Refusal> {
        if join.assignors.is_empty() {
            return refuse(
                ErrorCode::InconsistentAssignor,
                format!("{} offers no assignor", named(&join.client, &join.instance)),
            );
        }
        Ok(Self {
            id: member_id(&join.member_id)?,
            epoch: join.member_epoch,
            instance: join.instance.as_str().into(),
            rack: join.rack.as_str().into(),
            client: join.client.as_str().into(),
            assignors: join.assignors.clone(),
            topics: subscriptions(&join.topics)?,
            session_timeout_ms: join.session_timeout_ms,
            revision: 0,
        })
    }

    /// Whether it reads a topic.
    #[must_use]
    pub fn reads(&self, topic: TopicId) -> bool {
        self.topics
            .binary_search_by_key(&topic, |one| one.topic)
            .is_ok()
    }

    /// The same in all that it says of itself.
    pub(in crate::groups) fn says_the_same_as(&self, other: &Self) -> bool {
        let Self {
            id,
            epoch,
            instance,
            rack,
            client,
            assignors,
            topics,
            session_timeout_ms,
            revision: _,
        } = other;
        (self.id, self.epoch, self.session_timeout_ms) == (*id, *epoch, *session_timeout_ms)
            && (&self.instance, &self.rack, &self.client) == (instance, rack, client)
            && (&self.assignors, &self.topics) == (assignors, topics)
    }

    /// For people.
    pub(super) fn described(&self) -> String {
        format!("{} ({})", named(&self.client, &self.instance), self.id)
    }

    fn bytes(&self) -> usize {
        let assignors = self.assignors.iter().map(|one| one.name.len());
        size_of::<Self>()
            + self.instance.len()
            + self.rack.len()
            + self.client.len()
            + self.assignors.len() * size_of::<AssignorVersion>()
            + assignors.sum::<usize>()
            + self.topics.len() * size_of::<Subscription>()
    }
}

fn named(client: &str, instance: &str) -> String {
    match (client, instance) {
        ("", "") => "a member".to_owned(),
        (client, "") => format!("member `{client}`"),
        (_, instance) => format!("member `{instance}`"),
    }
}

pub(super) fn member_id(bytes: &[u8]) -> Result<MemberId, Refusal> {
    MemberId::from_wire(bytes)
        .ok_or_else(|| Refusal::new(ErrorCode::InvalidArgument, "a member id has 16 bytes"))
}

pub(super) fn topic_id(bytes: &[u8]) -> Result<TopicId, Refusal> {
    TopicId::from_wire(bytes)
        .ok_or_else(|| Refusal::new(ErrorCode::InvalidArgument, "a topic id has 16 bytes"))
}

/// In the order of topic ids.
pub(super) fn subscriptions(
    topics: &[v1::TopicSubscription],
) -> Result<Vec<Subscription>, Refusal> {
    let mut read = Vec::with_capacity(topics.len());
    for one in topics {
        read.push(Subscription {
            topic: topic_id(&one.topic_id)?,
            partitions: one.partitions,
        });
    }
    read.sort_by_key(|one| one.topic);
    match read.array_windows().find(|[a, b]| a.topic == b.topic) {
        Some([twice, _]) => refuse(
            ErrorCode::InvalidArgument,
            format!("topic {} is subscribed to twice", twice.topic),
        ),
        None => Ok(read),
    }
}

/// The members of one group.
#[derive(Debug, Clone, Default)]
pub struct Members {
    seats: Vec<Option<Box<Member>>>,
    /// In order of joining; a successor has its predecessor's place.
    order: Vec<Seat>,
    /// By id.
    by_id: Vec<(MemberId, Seat)>,
    /// Of all members together.
    bytes: usize,
}

impl Members {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// In order of joining, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Member> {
        self.seated().map(|(_, member)| member)
    }

    /// With their seats.
    pub(super) fn seated(&self) -> impl Iterator<Item = (Seat, &Member)> {
        let with = |seat: &Seat| self.at(*seat).map(|member| (*seat, member));
        self.order.iter().filter_map(with)
    }

    pub(super) fn seat_of(&self, id: MemberId) -> Option<Seat> {
        let found = self.by_id.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.by_id.get(found).map(|(_, seat)| *seat)
    }

    /// The member of that id.
    #[must_use]
    pub fn get(&self, id: MemberId) -> Option<&Member> {
        self.at(self.seat_of(id)?)
    }

    pub(super) fn at(&self, seat: Seat) -> Option<&Member> {
        self.seats.get(seat.index())?.as_deref()
    }

    /// The member of a stable name.
    pub(super) fn of_instance(&self, instance: &str) -> Option<(Seat, &Member)> {
        if instance.is_empty() {
            return None;
        }
        self.seated()
            .find(|(_, member)| &*member.instance == instance)
    }

    /// One more than the greatest index of a seat.
    pub(super) fn seats(&self) -> usize {
        self.seats.len()
    }

    /// The last in the order. `None`: there is no seat left, or the id is taken.
    pub(super) fn add(&mut self, member: Member) -> Option<Seat> {
        let place = self
            .by_id
            .binary_search_by_key(&member.id, |(id, _)| *id)
            .err()?;
        let free = self.seats.iter().position(Option::is_none);
        let seat = Seat::from_index(free.unwrap_or(self.seats.len()))?;
        self.by_id.insert(place, (member.id, seat));
        self.order.push(seat);
        self.bytes += member.bytes();
        match self.seats.get_mut(seat.index()) {
            Some(free) => *free = Some(Box::new(member)),
            None => self.seats.push(Some(Box::new(member))),
        }
        Some(seat)
    }

    /// Another member, or the same anew, on a seat.
    pub(super) fn replace(&mut self, seat: Seat, member: Member) {
        self.by_id.retain(|(_, other)| *other != seat);
        let place = self.by_id.partition_point(|(id, _)| *id < member.id);
        self.by_id.insert(place, (member.id, seat));
        self.weigh_out(seat);
        self.bytes += member.bytes();
        if let Some(taken) = self.seats.get_mut(seat.index()) {
            *taken = Some(Box::new(member));
        }
    }

    pub(super) fn remove(&mut self, seat: Seat) {
        self.by_id.retain(|(_, other)| *other != seat);
        self.order.retain(|other| *other != seat);
        self.weigh_out(seat);
        if let Some(taken) = self.seats.get_mut(seat.index()) {
            *taken = None;
        }
        while self.seats.last().is_some_and(Option::is_none) {
            self.seats.pop();
        }
    }

    fn weigh_out(&mut self, seat: Seat) {
        let bytes = self.at(seat).map_or(0, Member::bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Whether they are other ones than before.
    pub(super) fn set_topics(&mut self, seat: Seat, topics: Vec<Subscription>) -> bool {
        let Some(mut member) = self.at(seat).cloned() else {
            return false;
        };
        if member.topics == topics {
            return false;
        }
        member.topics = topics;
        self.replace(seat, member);
        true
    }

    /// Whether anybody reads fewer than before.
    pub(super) fn retain_topics(&mut self, keep: impl Fn(&Subscription) -> bool) -> bool {
        let mut is_changed = false;
        for member in self.seats.iter_mut().filter_map(Option::as_deref_mut) {
            let (before, read) = (member.bytes(), member.topics.len());
            member.topics.retain(&keep);
            is_changed |= member.topics.len() != read;
            self.bytes = self.bytes.saturating_sub(before) + member.bytes();
        }
        is_changed
    }

    /// Notes a change that concerns all.
    pub(super) fn touch_all(&mut self, revision: u64) {
        for member in self.seats.iter_mut().filter_map(Option::as_deref_mut) {
            member.revision = revision;
        }
    }

    /// Notes a change that concerns one.
    pub(super) fn touch(&mut self, seat: Seat, revision: u64) {
        if let Some(Some(member)) = self.seats.get_mut(seat.index()) {
            member.revision = revision;
        }
    }

    /// Kept, not counted.
    pub(super) fn bytes(&self) -> usize {
        let each = size_of::<(Option<Box<Member>>, Seat, (MemberId, Seat))>();
        self.order.len() * each + self.bytes
    }
}
