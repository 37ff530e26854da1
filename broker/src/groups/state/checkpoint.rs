//! The bytes of a checkpoint: deterministic, and about a dozen for each offset.
//!
//! Version 1. `n` is an unsigned LEB128 number, `text` a length `n` and so many bytes of UTF-8, `id`
//! 16 bytes. Topic ids stand once, in a table at the front. Times are distances back from the time
//! of the checkpoint.
//!
//! ```text
//! version u8 | time ms n | topics n, id... | groups n, group...
//! group:   name text | generation n | assigned generation n | revision n | empty for ms n
//!          | members n, member... | topics n, topic...
//! member:  id | epoch n | instance text | rack text | client text | session timeout ms n
//!          | revision n | assignors n, (name text, version n)... | topics n, (topic n, partitions n)...
//! topic:   topic n | slots n, slot...
//! slot:    partitions passed over since the one before n | flags u8
//!          | holder n | target n | claim epoch n | offset n, leader epoch n, age ms n | metadata text
//! ```
//!
//! Flags say which of the parts are there: 1 holder, 2 target, 4 claim epoch, 8 offset, 16 metadata.
//! A topic is its number in the table, a holder or target the number of the member, in order of
//! joining from 0. Everything sorted is in rising order: names, topic ids, partitions.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes};
use qute_proto::group::check_name;
use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::AssignorVersion;

use super::group::Group;
use super::members::{Member, Seat, Subscription};
use super::slots::{Claim, Committed, Slot};
use super::{Groups, Totals, Weight};
use crate::raft::RestoreError;

const VERSION: u8 = 1;
const HELD: u8 = 1;
const TARGETED: u8 = 2;
const CLAIMED: u8 = 4;
const COMMITTED: u8 = 8;
const METADATA: u8 = 16;

impl Groups {
    /// The state, encoded.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let topics = self.topics();
        let mut writer = Writer {
            out: Vec::with_capacity(64 + 24 * self.totals.offsets),
            topics: &topics,
            time_ms: self.time_ms,
        };
        writer.out.put_u8(VERSION);
        writer.number(self.time_ms);
        writer.count(topics.len());
        for topic in &topics {
            writer.out.put_slice(topic.0.as_bytes());
        }
        writer.count(self.groups.len());
        for (name, group) in &self.groups {
            writer.text(name);
            writer.group(group);
        }
        writer.out.into()
    }

    /// All that are named anywhere, in rising order.
    fn topics(&self) -> Vec<TopicId> {
        let mut topics = BTreeSet::new();
        for group in self.groups.values() {
            topics.extend(group.slots.by_topic().map(|(topic, _)| topic));
            let members = group.members.iter();
            topics.extend(members.flat_map(|it| it.topics.iter().map(|one| one.topic)));
        }
        topics.into_iter().collect()
    }

    /// Reads a checkpoint.
    ///
    /// # Errors
    /// The bytes are none, or not of this version.
    pub fn decode(input: &[u8]) -> Result<Self, RestoreError> {
        let mut reader = Reader { input };
        let version = reader.byte()?;
        if version != VERSION {
            return Err(RestoreError::new(format!(
                "version {version}, this broker reads {VERSION}"
            )));
        }
        let time_ms = reader.number()?;
        let topics = reader.table()?;
        let mut groups = Self {
            time_ms,
            totals: Totals::default(),
            ..Self::default()
        };
        for _ in 0..reader.number()? {
            let name = reader.text()?;
            let is_behind = groups
                .groups
                .last_key_value()
                .is_none_or(|(it, _)| **it < *name);
            if !is_behind || check_name(name).is_err() {
                return Err(malformed("group name"));
            }
            let group = reader.group(&topics, time_ms)?;
            groups
                .totals
                .replace(&Weight::default(), &Weight::of(&group));
            groups.groups.insert(Arc::from(name), Box::new(group));
        }
        if !reader.input.is_empty() {
            return Err(malformed("end"));
        }
        Ok(groups)
    }
}

struct Writer<'a> {
    out: Vec<u8>,
    topics: &'a [TopicId],
    time_ms: u64,
}

impl Writer<'_> {
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            let [low, ..] = number.to_le_bytes();
            self.out.put_u8(low | 0x80);
            number >>= 7;
        }
        let [last, ..] = number.to_le_bytes();
        self.out.put_u8(last);
    }

    fn count(&mut self, count: usize) {
        self.number(u64::try_from(count).unwrap_or(u64::MAX));
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.out.put_slice(text.as_bytes());
    }

    fn topic(&mut self, topic: TopicId) {
        let number = self.topics.partition_point(|it| *it < topic);
        self.count(number);
    }

    fn age(&mut self, time_ms: u64) {
        self.number(self.time_ms.saturating_sub(time_ms));
    }

    fn group(&mut self, group: &Group) {
        self.number(group.generation);
        self.number(group.assigned_generation);
        self.number(group.revision);
        // Without meaning while there are members.
        let empty_since_ms = group.empty_since_ms().unwrap_or(self.time_ms);
        self.age(empty_since_ms);
        self.count(group.members.len());
        let mut numbers = vec![0; group.members.seats()];
        for (number, (seat, member)) in group.members.seated().enumerate() {
            if let Some(of_seat) = numbers.get_mut(seat.index()) {
                *of_seat = number;
            }
            self.member(member);
        }
        self.count(group.slots.by_topic().len());
        for (topic, slots) in group.slots.by_topic() {
            self.topic(topic);
            self.count(slots.len());
            let mut next = 0;
            for slot in slots {
                let passed_over = u64::from(slot.partition()).saturating_sub(next);
                next = u64::from(slot.partition()) + 1;
                self.number(passed_over);
                self.slot(slot, &numbers);
            }
        }
    }

    fn member(&mut self, member: &Member) {
        self.out.put_slice(member.id.0.as_bytes());
        self.number(member.epoch);
        self.text(&member.instance);
        self.text(&member.rack);
        self.text(&member.client);
        self.number(u64::from(member.session_timeout_ms));
        self.number(member.revision);
        self.count(member.assignors.len());
        for assignor in &member.assignors {
            self.text(&assignor.name);
            self.number(u64::from(assignor.version));
        }
        self.count(member.topics.len());
        for one in &member.topics {
            self.topic(one.topic);
            self.number(u64::from(one.partitions));
        }
    }

    /// `numbers`: of the members, by the index of their seats.
    fn slot(&mut self, slot: &Slot, numbers: &[usize]) {
        let number = |seat: Seat| numbers.get(seat.index()).copied().unwrap_or(0);
        let committed = slot.committed();
        let metadata = committed.map_or("", |it| it.metadata);
        let flag = |is_there: bool, flag: u8| if is_there { flag } else { 0 };
        self.out.put_u8(
            flag(slot.holder.is_some(), HELD)
                | flag(slot.target.is_some(), TARGETED)
                | flag(slot.claim_epoch != 0, CLAIMED)
                | flag(committed.is_some(), COMMITTED)
                | flag(!metadata.is_empty(), METADATA),
        );
        for seat in [slot.holder, slot.target].into_iter().flatten() {
            self.count(number(seat));
        }
        if slot.claim_epoch != 0 {
            self.number(slot.claim_epoch);
        }
        if let Some(committed) = committed {
            self.number(committed.offset);
            self.number(committed.leader_epoch);
            self.age(committed.time_ms);
        }
        if !metadata.is_empty() {
            self.text(metadata);
        }
    }
}

fn malformed(what: &'static str) -> RestoreError {
    RestoreError::new(format!("malformed {what}"))
}

/// Allocates nothing ahead of what it has read.
struct Reader<'a> {
    input: &'a [u8],
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Result<u8, RestoreError> {
        self.input.try_get_u8().map_err(|_| malformed("end"))
    }

    fn number(&mut self) -> Result<u64, RestoreError> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for one bit.
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(malformed("number"))
    }

    fn short(&mut self, what: &'static str) -> Result<u32, RestoreError> {
        u32::try_from(self.number()?).map_err(|_| malformed(what))
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], RestoreError> {
        let (bytes, rest) = self
            .input
            .split_at_checked(length)
            .ok_or_else(|| malformed("length"))?;
        self.input = rest;
        Ok(bytes)
    }

    fn text(&mut self) -> Result<&'a str, RestoreError> {
        let length = usize::try_from(self.number()?).map_err(|_| malformed("length"))?;
        std::str::from_utf8(self.bytes(length)?).map_err(|_| malformed("text"))
    }

    fn table(&mut self) -> Result<Vec<TopicId>, RestoreError> {
        let mut topics: Vec<TopicId> = Vec::new();
        for _ in 0..self.number()? {
            let id = TopicId::from_wire(self.bytes(16)?).ok_or_else(|| malformed("topic id"))?;
            if topics.last().is_some_and(|last| *last >= id) {
                return Err(malformed("table of topics"));
            }
            topics.push(id);
        }
        Ok(topics)
    }

    fn topic(&mut self, topics: &[TopicId]) -> Result<TopicId, RestoreError> {
        let number = usize::try_from(self.number()?).map_err(|_| malformed("topic"))?;
        topics
            .get(number)
            .copied()
            .ok_or_else(|| malformed("topic"))
    }

    fn past(&mut self, time_ms: u64) -> Result<u64, RestoreError> {
        let age = self.number()?;
        time_ms.checked_sub(age).ok_or_else(|| malformed("time"))
    }

    fn group(&mut self, topics: &[TopicId], time_ms: u64) -> Result<Group, RestoreError> {
        let mut group = Group {
            generation: self.number()?,
            assigned_generation: self.number()?,
            revision: self.number()?,
            ..Group::default()
        };
        let empty_since_ms = self.past(time_ms)?;
        let mut seats = Vec::new();
        for _ in 0..self.number()? {
            let member = self.member(topics)?;
            let is_taken = group.members.of_instance(&member.instance).is_some();
            match group.members.add(member) {
                Some(seat) if !is_taken => seats.push(seat),
                _ => return Err(malformed("member")),
            }
        }
        if group.members.is_empty() {
            group.empty_since_ms = empty_since_ms;
        }
        let mut last = None;
        for _ in 0..self.number()? {
            let topic = self.topic(topics)?;
            if last.is_some_and(|last| last >= topic) {
                return Err(malformed("order of topics"));
            }
            last = Some(topic);
            group.slots.append(topic, self.slots(&seats, time_ms)?);
        }
        Ok(group)
    }

    fn member(&mut self, topics: &[TopicId]) -> Result<Member, RestoreError> {
        let id = MemberId::from_wire(self.bytes(16)?).ok_or_else(|| malformed("member id"))?;
        let mut member = Member {
            id,
            epoch: self.number()?,
            instance: self.text()?.into(),
            rack: self.text()?.into(),
            client: self.text()?.into(),
            session_timeout_ms: self.short("session timeout")?,
            revision: self.number()?,
            assignors: Vec::new(),
            topics: Vec::new(),
        };
        for _ in 0..self.number()? {
            member.assignors.push(AssignorVersion {
                name: self.text()?.to_owned(),
                version: self.short("assignor version")?,
            });
        }
        for _ in 0..self.number()? {
            let topic = self.topic(topics)?;
            if member.topics.last().is_some_and(|last| last.topic >= topic) {
                return Err(malformed("order of topics"));
            }
            let partitions = self.short("number of partitions")?;
            member.topics.push(Subscription { topic, partitions });
        }
        Ok(member)
    }

    fn slots(&mut self, seats: &[Seat], time_ms: u64) -> Result<Vec<Slot>, RestoreError> {
        let count = self.number()?;
        if count == 0 {
            return Err(malformed("topic without partitions"));
        }
        // Each takes two bytes at least.
        let most = self.input.len() / 2;
        let mut slots = Vec::with_capacity(usize::try_from(count).unwrap_or(most).min(most));
        let mut next = 0u64;
        for _ in 0..count {
            let number = next.checked_add(self.number()?);
            let partition = number.and_then(|it| u32::try_from(it).ok());
            let partition = partition.ok_or_else(|| malformed("partition"))?;
            next = u64::from(partition) + 1;
            slots.push(self.slot(partition, seats, time_ms)?);
        }
        Ok(slots)
    }

    fn slot(&mut self, partition: u32, seats: &[Seat], time_ms: u64) -> Result<Slot, RestoreError> {
        let flags = self.byte()?;
        let is = |flag: u8| flags & flag != 0;
        let is_known = flags < METADATA << 1;
        if !is_known || (is(METADATA) && !is(COMMITTED)) || (is(TARGETED) && !is(HELD)) {
            return Err(malformed("flags"));
        }
        let mut seat = |is_there: bool| {
            if !is_there {
                return Ok(None);
            }
            let number = usize::try_from(self.number()?).unwrap_or(usize::MAX);
            let seat = seats.get(number).copied();
            seat.map(Some).ok_or_else(|| malformed("holder or target"))
        };
        let claim = Claim {
            holder: seat(is(HELD))?,
            target: seat(is(TARGETED))?,
            epoch: if is(CLAIMED) { self.number()? } else { 0 },
        };
        if !is(COMMITTED) {
            return Ok(Slot::restored(partition, claim, None));
        }
        let committed = Committed {
            offset: self.number()?,
            leader_epoch: self.number()?,
            time_ms: self.past(time_ms)?,
            metadata: if is(METADATA) { self.text()? } else { "" },
        };
        if !Committed::can_be(committed.offset) {
            return Err(malformed("offset"));
        }
        Ok(Slot::restored(partition, claim, Some(&committed)))
    }
}
