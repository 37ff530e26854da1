//! Who has what while an assignment is computed: the input by number, and the owner of each partition.
//!
//! Members are numbered in the order of their ids and partitions in the order of topics, so that the order
//! of the input plays no part.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use qute_proto::ids::{MemberId, PartitionId, TopicId};

use super::{AssignInput, AssignMember, Assignment};

/// More partitions than any group has; what a member claims to know beyond is not assigned.
const PARTITIONS_MAX: usize = 1_000_000;

/// Number of a member.
pub(super) type Member = usize;
/// Number of a partition, over all topics.
pub(super) type Place = usize;
type Rack = usize;

/// How much a member is attached to a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Bond {
    /// Not at all: moving it costs nothing.
    None,
    /// The assignment in force gives it to the member, which does not hold it yet.
    Target,
    /// It holds it, and was to give it up.
    Claim,
    /// It holds it, and was to keep it.
    Both,
}

/// A topic, by number.
struct Topic {
    id: TopicId,
    first: Place,
    partitions: usize,
    /// Its readers with the number of partitions that each knows of.
    readers: Vec<(Member, usize)>,
}

/// The input, by number.
pub(super) struct Table<'a> {
    members: Vec<&'a AssignMember>,
    topics: Vec<Topic>,
    /// Of each place: its topic.
    topic_of: Vec<usize>,
    /// Of each member: how many partitions of a topic it knows of.
    knows: Vec<BTreeMap<usize, usize>>,
    member_racks: Vec<Option<Rack>>,
    place_racks: Vec<Vec<Rack>>,
    claims: Vec<Option<Member>>,
    targets: Vec<Option<Member>>,
    /// Who holds something that is promised to whom.
    promised: HashSet<(Member, Member)>,
}

impl<'a> Table<'a> {
    pub(super) fn new(input: &'a AssignInput) -> Self {
        let by_id: BTreeMap<MemberId, &AssignMember> =
            input.members.iter().map(|it| (it.id, it)).collect();
        let members: Vec<&AssignMember> = by_id.into_values().collect();
        let topics = number_topics(&members);
        let numbers: HashMap<TopicId, usize> = (0..).zip(&topics).map(|(n, t)| (t.id, n)).collect();
        let mut topic_of = Vec::new();
        for (number, topic) in topics.iter().enumerate() {
            topic_of.extend(std::iter::repeat_n(number, topic.partitions));
        }
        let knows_of = |member: &&AssignMember| {
            let known = member.topics.iter().filter_map(|(id, &partitions)| {
                let number = *numbers.get(id)?;
                Some((number, topics[number].partitions.min(to_usize(partitions))))
            });
            known.collect()
        };
        let racks = Racks::new(input);
        let mut table = Self {
            knows: members.iter().map(knows_of).collect(),
            member_racks: members.iter().map(|it| racks.of(&it.rack)).collect(),
            place_racks: vec![Vec::new(); topic_of.len()],
            claims: vec![None; topic_of.len()],
            targets: vec![None; topic_of.len()],
            promised: HashSet::new(),
            members,
            topics,
            topic_of,
        };
        for (id, by_partition) in &input.racks {
            let Some(&topic) = numbers.get(id) else {
                continue;
            };
            let Topic {
                first, partitions, ..
            } = table.topics[topic];
            for (place, names) in (first..first + partitions).zip(by_partition) {
                table.place_racks[place] = names.iter().filter_map(|it| racks.of(it)).collect();
            }
        }
        for (number, member) in table.members.clone().into_iter().enumerate() {
            for place in table.places_of(&numbers, number, &member.claims) {
                table.claims[place].get_or_insert(number);
            }
            for place in table.places_of(&numbers, number, &member.targets) {
                table.targets[place].get_or_insert(number);
            }
        }
        let both = table.claims.iter().zip(&table.targets);
        let pairs = both.filter_map(|(claim, target)| Some(((*claim)?, (*target)?)));
        table.promised = pairs.filter(|(claim, target)| claim != target).collect();
        table
    }

    /// The places of the partitions that the member may have.
    fn places_of(
        &self,
        numbers: &HashMap<TopicId, usize>,
        member: Member,
        partitions: &[PartitionId],
    ) -> Vec<Place> {
        let place = |partition: &PartitionId| {
            let topic = &self.topics[*numbers.get(&partition.topic)?];
            let number = to_usize(partition.partition);
            let place = (number < topic.partitions).then_some(topic.first + number)?;
            self.may(member, place).then_some(place)
        };
        partitions.iter().filter_map(place).collect()
    }

    pub(super) fn members(&self) -> usize {
        self.members.len()
    }

    pub(super) fn places(&self) -> usize {
        self.topic_of.len()
    }

    pub(super) fn topics(&self) -> usize {
        self.topics.len()
    }

    pub(super) fn topic_of(&self, place: Place) -> usize {
        self.topic_of[place]
    }

    /// Its number within its topic.
    pub(super) fn number(&self, place: Place) -> usize {
        place - self.topics[self.topic_of[place]].first
    }

    /// The readers of a topic, each with the number of partitions that it knows of.
    pub(super) fn readers(&self, topic: usize) -> &[(Member, usize)] {
        &self.topics[topic].readers
    }

    /// Those that the partition may be given to.
    pub(super) fn candidates(&self, place: Place) -> impl Iterator<Item = Member> {
        let number = self.number(place);
        let readers = self.readers(self.topic_of[place]).iter();
        readers.filter_map(move |&(member, knows)| (number < knows).then_some(member))
    }

    /// Whether the member reads the partition.
    pub(super) fn may(&self, member: Member, place: Place) -> bool {
        let knows = self.knows[member].get(&self.topic_of[place]);
        knows.is_some_and(|&knows| self.number(place) < knows)
    }

    /// What the member reads: the same for all members of a class.
    pub(super) fn knows(&self, member: Member) -> &BTreeMap<usize, usize> {
        &self.knows[member]
    }

    pub(super) fn is_static(&self, member: Member) -> bool {
        self.members[member].instance.is_some()
    }

    pub(super) fn rack(&self, member: Member) -> Option<Rack> {
        self.member_racks[member]
    }

    /// The racks that have a replica of the partition, as far as members are in them.
    pub(super) fn racks(&self, place: Place) -> &[Rack] {
        &self.place_racks[place]
    }

    /// Whether a replica of the partition is in the member's rack.
    pub(super) fn near(&self, member: Member, place: Place) -> bool {
        self.rack(member)
            .is_some_and(|rack| self.racks(place).contains(&rack))
    }

    pub(super) fn claimed_by(&self, place: Place) -> Option<Member> {
        self.claims[place]
    }

    pub(super) fn target_of(&self, place: Place) -> Option<Member> {
        self.targets[place]
    }

    /// Whether one holds something that is promised to the other.
    pub(super) fn is_promised(&self, from: Member, to: Member) -> bool {
        self.promised.contains(&(from, to))
    }

    pub(super) fn bond(&self, member: Member, place: Place) -> Bond {
        let claims = self.claims[place] == Some(member);
        match (claims, self.targets[place] == Some(member)) {
            (false, false) => Bond::None,
            (false, true) => Bond::Target,
            (true, false) => Bond::Claim,
            (true, true) => Bond::Both,
        }
    }
}

fn number_topics(members: &[&AssignMember]) -> Vec<Topic> {
    let mut readers = BTreeMap::<TopicId, Vec<(Member, usize)>>::new();
    for (number, member) in members.iter().enumerate() {
        for (&id, &partitions) in &member.topics {
            let reader = (number, to_usize(partitions));
            readers.entry(id).or_default().push(reader);
        }
    }
    let mut first = 0;
    let number = |(id, readers): (TopicId, Vec<(Member, usize)>)| {
        let known = readers.iter().map(|(_, partitions)| *partitions).max();
        let partitions = known.unwrap_or(0).min(PARTITIONS_MAX - first);
        let topic = Topic {
            id,
            first,
            partitions,
            readers,
        };
        first += partitions;
        topic
    };
    readers.into_iter().map(number).collect()
}

/// The racks that members are in: others play no part.
struct Racks<'a>(BTreeMap<&'a str, Rack>);

impl<'a> Racks<'a> {
    fn new(input: &'a AssignInput) -> Self {
        let names = input.members.iter().map(|it| it.rack.as_str());
        let names: BTreeSet<&str> = names.filter(|it| !it.is_empty()).collect();
        Self(names.into_iter().zip(0..).collect())
    }

    fn of(&self, name: &str) -> Option<Rack> {
        self.0.get(name).copied()
    }
}

fn to_usize(partitions: u32) -> usize {
    usize::try_from(partitions).unwrap_or(usize::MAX)
}

/// A partition that a member has, ordered by how it gives them away: the loosest bond first, far before
/// near.
pub(super) type Held = (Bond, bool, Place);
/// What a member has, by topic.
pub(super) type Hand = BTreeMap<usize, BTreeSet<Held>>;

/// Who has what.
pub(super) struct Board<'t, 'a> {
    pub(super) table: &'t Table<'a>,
    owners: Vec<Option<Member>>,
    loads: Vec<usize>,
    /// Of each member.
    hands: Vec<Hand>,
}

impl<'t, 'a> Board<'t, 'a> {
    /// Nobody has anything.
    pub(super) fn new(table: &'t Table<'a>) -> Self {
        Self {
            table,
            owners: vec![None; table.places()],
            loads: vec![0; table.members()],
            hands: vec![BTreeMap::new(); table.members()],
        }
    }

    pub(super) fn owner(&self, place: Place) -> Option<Member> {
        self.owners[place]
    }

    pub(super) fn load(&self, member: Member) -> usize {
        self.loads[member]
    }

    pub(super) fn hand(&self, member: Member) -> &Hand {
        &self.hands[member]
    }

    /// Gives a partition to a member that reads it; whoever had it loses it.
    pub(super) fn give(&mut self, place: Place, member: Member) {
        let topic = self.table.topic_of(place);
        if let Some(owner) = self.owners[place].replace(member) {
            let key = self.key(owner, place);
            if let Some(hand) = self.hands[owner].get_mut(&topic) {
                hand.remove(&key);
                if hand.is_empty() {
                    self.hands[owner].remove(&topic);
                }
            }
            self.loads[owner] -= 1;
        }
        let key = self.key(member, place);
        self.hands[member].entry(topic).or_default().insert(key);
        self.loads[member] += 1;
    }

    fn key(&self, member: Member, place: Place) -> Held {
        let bond = self.table.bond(member, place);
        (bond, self.table.near(member, place), place)
    }

    /// Whether everything that anybody reads has an owner.
    pub(super) fn is_complete(&self) -> bool {
        let free = |&place: &Place| self.owner(place).is_none();
        let mut free = (0..self.table.places()).filter(free);
        free.all(|place| self.table.candidates(place).next().is_none())
    }

    pub(super) fn into_assignment(self) -> Assignment {
        let mut assignment = Assignment::default();
        for (place, owner) in self.owners.iter().enumerate() {
            let Some(owner) = *owner else { continue };
            let partition = PartitionId {
                topic: self.table.topics[self.table.topic_of(place)].id,
                partition: u32::try_from(self.table.number(place)).unwrap_or(u32::MAX),
            };
            assignment.give(self.table.members[owner].id, partition);
        }
        assignment
    }
}
