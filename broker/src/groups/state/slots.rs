//! What a group knows of each partition: its holder, its claim epoch, its committed offset.
//!
//! Kept small, because there are many: the topic id stands once for all partitions of a topic, seats
//! stand for members, and 48 bytes are left for each partition. Found by binary search.

use qute_proto::ids::TopicId;

use super::members::Seat;

/// A committed offset that is none: no record can have it.
const NONE: u64 = u64::MAX;

/// A committed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed<'a> {
    /// The next one to read.
    pub offset: u64,
    /// Of the record before it, as the committer knew it; 0: unknown.
    pub leader_epoch: u64,
    /// Broker time of the commit, Unix milliseconds.
    pub time_ms: u64,
    /// The program's own.
    pub metadata: &'a str,
}

impl Committed<'_> {
    /// Whether an offset can be committed at all.
    #[must_use]
    pub fn can_be(offset: u64) -> bool {
        offset != NONE
    }
}

/// Thin, since most commits carry none.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Metadata(Box<str>);

/// One partition, as a group knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    partition: u32,
    /// Who has the claim.
    pub(super) holder: Option<Seat>,
    /// Whom the published assignment gives it to.
    pub(super) target: Option<Seat>,
    /// Of the claim, or of the last there was; 0: it has never been claimed. Never falls.
    pub(super) claim_epoch: u64,
    offset: u64,
    leader_epoch: u64,
    time_ms: u64,
    metadata: Option<Box<Metadata>>,
}

const _: () = assert!(size_of::<Slot>() == 48);

/// Who has a partition, and who is to have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    pub(super) holder: Option<Seat>,
    pub(super) target: Option<Seat>,
    pub(super) epoch: u64,
}

impl Slot {
    fn new(partition: u32) -> Self {
        Self {
            partition,
            holder: None,
            target: None,
            claim_epoch: 0,
            offset: NONE,
            leader_epoch: 0,
            time_ms: 0,
            metadata: None,
        }
    }

    /// As it was in a checkpoint.
    pub(super) fn restored(
        partition: u32,
        claim: Claim,
        committed: Option<&Committed<'_>>,
    ) -> Self {
        let mut slot = Self {
            holder: claim.holder,
            target: claim.target,
            claim_epoch: claim.epoch,
            ..Self::new(partition)
        };
        if let Some(committed) = committed {
            slot.set(committed);
        }
        slot
    }

    /// Its number within the topic.
    #[must_use]
    pub fn partition(&self) -> u32 {
        self.partition
    }

    /// Epoch of the claim, or of the last there was; 0: never claimed.
    #[must_use]
    pub fn claim_epoch(&self) -> u64 {
        self.claim_epoch
    }

    /// Whether somebody has the claim.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.holder.is_some()
    }

    /// The committed offset.
    #[must_use]
    pub fn committed(&self) -> Option<Committed<'_>> {
        (self.offset != NONE).then(|| Committed {
            offset: self.offset,
            leader_epoch: self.leader_epoch,
            time_ms: self.time_ms,
            metadata: self.metadata.as_deref().map_or("", |it| &it.0),
        })
    }

    /// Takes the claim under the next epoch.
    pub(super) fn claim(&mut self, seat: Seat) {
        self.holder = Some(seat);
        self.raise_epoch();
    }

    pub(super) fn raise_epoch(&mut self) {
        self.claim_epoch = self.claim_epoch.saturating_add(1);
    }

    /// Gives the claim to whom the assignment says, if nobody has it. The one place where claims
    /// are granted.
    pub(super) fn grant(&mut self) -> Option<Seat> {
        match (self.holder, self.target) {
            (None, Some(target)) => {
                self.claim(target);
                Some(target)
            }
            _ => None,
        }
    }

    fn set(&mut self, committed: &Committed<'_>) {
        self.offset = committed.offset;
        self.leader_epoch = committed.leader_epoch;
        self.time_ms = committed.time_ms;
        self.metadata = match committed.metadata {
            "" => None,
            text => Some(Box::new(Metadata(text.into()))),
        };
    }

    fn metadata_bytes(&self) -> usize {
        let bytes = |it: &Metadata| size_of::<Metadata>() + it.0.len();
        self.metadata.as_deref().map_or(0, bytes)
    }
}

/// The partitions of one topic incarnation, by number.
#[derive(Debug, Clone)]
struct TopicSlots {
    topic: TopicId,
    slots: Vec<Slot>,
}

/// What is counted of all slots of a group as they change.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    slots: usize,
    /// With a committed offset.
    committed: usize,
    metadata_bytes: usize,
}

impl Sums {
    fn add(&mut self, slot: &Slot) {
        self.slots += 1;
        self.committed += usize::from(slot.offset != NONE);
        self.metadata_bytes += slot.metadata_bytes();
    }
}

/// A partition whose committed offset may change, and the sums with it.
pub(super) struct Entry<'a> {
    pub(super) slot: &'a mut Slot,
    sums: &'a mut Sums,
}

impl Entry<'_> {
    /// Sets the committed offset, forwards or back.
    pub(super) fn commit(self, committed: &Committed<'_>) {
        let Self { slot, sums } = self;
        let is_new = slot.offset == NONE;
        let before = slot.metadata_bytes();
        slot.set(committed);
        sums.committed += usize::from(is_new);
        sums.metadata_bytes = sums.metadata_bytes.saturating_sub(before) + slot.metadata_bytes();
    }

    /// Forgets the committed offset.
    pub(super) fn forget(self) {
        let Self { slot, sums } = self;
        if slot.offset == NONE {
            return;
        }
        sums.committed = sums.committed.saturating_sub(1);
        sums.metadata_bytes = sums.metadata_bytes.saturating_sub(slot.metadata_bytes());
        (slot.offset, slot.leader_epoch, slot.time_ms) = (NONE, 0, 0);
        slot.metadata = None;
    }
}

/// The partitions that a group knows, by topic id and number.
#[derive(Debug, Clone, Default)]
pub struct Slots {
    topics: Vec<TopicSlots>,
    sums: Sums,
}

impl Slots {
    /// How many are known, with or without a committed offset.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sums.slots
    }

    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sums.slots == 0
    }

    /// How many have a committed offset.
    #[must_use]
    pub fn committed(&self) -> usize {
        self.sums.committed
    }

    /// One partition.
    #[must_use]
    pub fn get(&self, topic: TopicId, partition: u32) -> Option<&Slot> {
        let topic = &self.topics.get(self.find(topic).ok()?)?.slots;
        topic.get(place(topic, partition).ok()?)
    }

    pub(super) fn get_mut(&mut self, topic: TopicId, partition: u32) -> Option<&mut Slot> {
        self.entry(topic, partition).map(|entry| entry.slot)
    }

    /// One partition that is known.
    pub(super) fn entry(&mut self, topic: TopicId, partition: u32) -> Option<Entry<'_>> {
        let at = self.find(topic).ok()?;
        let topic = &mut self.topics.get_mut(at)?.slots;
        let at = place(topic, partition).ok()?;
        Some(Entry {
            slot: topic.get_mut(at)?,
            sums: &mut self.sums,
        })
    }

    /// All, by topic and number.
    pub fn iter<'a>(&'a self) -> impl Iterator<Item = (TopicId, &'a Slot)> {
        let of_topic = |it: &'a TopicSlots| {
            let topic = it.topic;
            it.slots.iter().map(move |slot| (topic, slot))
        };
        self.topics.iter().flat_map(of_topic)
    }

    /// All, topic by topic.
    pub(super) fn by_topic(&self) -> impl ExactSizeIterator<Item = (TopicId, &[Slot])> {
        self.topics.iter().map(|it| (it.topic, &*it.slots))
    }

    pub(super) fn iter_mut<'a>(&'a mut self) -> impl Iterator<Item = (TopicId, &'a mut Slot)> {
        let of_topic = |it: &'a mut TopicSlots| {
            let topic = it.topic;
            it.slots.iter_mut().map(move |slot| (topic, slot))
        };
        self.topics.iter_mut().flat_map(of_topic)
    }

    /// One partition, made known if it is not.
    pub(super) fn known(&mut self, topic: TopicId, partition: u32) -> Option<Entry<'_>> {
        let at = match self.find(topic) {
            Ok(at) => at,
            Err(at) => {
                let slots = Vec::new();
                grow(&mut self.topics);
                self.topics.insert(at, TopicSlots { topic, slots });
                at
            }
        };
        let slots = &mut self.topics.get_mut(at)?.slots;
        let at = match place(slots, partition) {
            Ok(at) => at,
            Err(at) => {
                grow(slots);
                slots.insert(at, Slot::new(partition));
                self.sums.slots += 1;
                at
            }
        };
        Some(Entry {
            slot: slots.get_mut(at)?,
            sums: &mut self.sums,
        })
    }

    /// Partitions of a topic behind all others, in the order of their numbers.
    pub(super) fn append(&mut self, topic: TopicId, slots: Vec<Slot>) {
        slots.iter().for_each(|slot| self.sums.add(slot));
        self.topics.push(TopicSlots { topic, slots });
    }

    /// Forgets partitions.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(TopicId, &Slot) -> bool) {
        let topics = std::mem::take(self).topics;
        for mut it in topics {
            let before = it.slots.len();
            it.slots.retain(|slot| keep(it.topic, slot));
            if it.slots.len() < before {
                it.slots.shrink_to_fit();
            }
            if !it.slots.is_empty() {
                self.append(it.topic, it.slots);
            }
        }
    }

    pub(super) fn has_topic(&self, topic: TopicId) -> bool {
        self.find(topic).is_ok()
    }

    /// Kept, not counted.
    pub(super) fn bytes(&self) -> usize {
        self.topics.len() * size_of::<TopicSlots>()
            + self.sums.slots * size_of::<Slot>()
            + self.sums.metadata_bytes
    }

    fn find(&self, topic: TopicId) -> Result<usize, usize> {
        self.topics.binary_search_by_key(&topic, |it| it.topic)
    }
}

fn place(slots: &[Slot], partition: u32) -> Result<usize, usize> {
    slots.binary_search_by_key(&partition, |slot| slot.partition)
}

/// Room for one more, by a quarter instead of by double: there are many small lists.
fn grow<T>(list: &mut Vec<T>) {
    if list.len() == list.capacity() {
        list.reserve_exact(1 + list.len() / 4);
    }
}
