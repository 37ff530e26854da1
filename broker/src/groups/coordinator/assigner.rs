//! Which member is to compute a group's assignment, and when it is asked.
//!
//! ```text
//!  generation rises        nothing has changed for 100 ms,       published
//!  ----------------> calm  or 500 ms are over              asked ---------> nobody is asked
//!                     ^ |--------------------------------> | ^ |
//!                     '-+- rises again --------------------' '-' 1 s: the next member with a
//!                                                                session, in the order of joining
//! ```
//!
//! Pure; times are moments of the coordinator's [`super::steady`] clock.

use std::time::Duration;

use qute_proto::ids::MemberId;

use super::steady::Moment;

/// How long a group must be calm before somebody is asked: a burst of joins makes one assignment.
pub const CALM: Duration = Duration::from_millis(100);
/// How long it waits for that, at most.
pub const CALM_WITHIN: Duration = Duration::from_millis(500);
/// How long a member has to publish before the next is asked.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// An assignment that is due.
#[derive(Debug)]
pub struct Asking {
    generation: u64,
    /// When this round of changes began.
    began: Moment,
    /// When the group is calm enough.
    calm: Moment,
    asked: Option<MemberId>,
    /// How often somebody was asked.
    times: u64,
    /// When there is something to do; `None`: when a member gets a session.
    due: Option<Moment>,
}

impl Asking {
    /// The group has risen to `generation`.
    pub fn new(generation: u64, now: Moment) -> Self {
        Self {
            generation,
            began: now,
            calm: now + CALM,
            asked: None,
            times: 0,
            due: Some(now + CALM),
        }
    }

    /// When [`ask`](Self::ask) is to be called.
    pub fn due(&self) -> Option<Moment> {
        self.due
    }

    /// Who has been asked for this generation, and how often anybody was.
    pub fn asked(&self) -> Option<(MemberId, u64)> {
        self.asked.map(|member| (member, self.times))
    }

    /// The group is at this generation now.
    pub fn at(&mut self, generation: u64, now: Moment) {
        if generation == self.generation {
            return;
        }
        if self.asked.take().is_some() {
            self.began = now;
        }
        self.generation = generation;
        self.calm = (now + CALM).min(self.began + CALM_WITHIN).max(now);
        self.due = Some(self.calm);
    }

    /// A member has got a session.
    pub fn attached(&mut self, now: Moment) {
        if self.due.is_none() {
            self.due = Some(self.calm.max(now));
        }
    }

    /// A member has lost its session.
    pub fn detached(&mut self, member: MemberId, now: Moment) {
        if self.asked == Some(member) {
            self.due = Some(now);
        }
    }

    /// Chooses whom to ask now: the next of those that have a session, from the oldest on.
    pub fn ask(
        &mut self,
        order: &[MemberId],
        has_session: impl Fn(&MemberId) -> bool,
        now: Moment,
    ) -> Option<MemberId> {
        let last = self
            .asked
            .and_then(|asked| order.iter().position(|member| *member == asked));
        let from = last.map_or(0, |at| at + 1);
        let (before, after) = order.split_at(from.min(order.len()));
        let chosen = after
            .iter()
            .chain(before)
            .find(|member| has_session(member));
        match chosen {
            Some(member) => {
                self.asked = Some(*member);
                self.times += 1;
                self.due = Some(now + PATIENCE);
            }
            None => self.due = None,
        }
        chosen.copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Moment {
        Moment::from_millis(ms)
    }

    fn members(count: usize) -> Vec<MemberId> {
        (0..count).map(|_| MemberId::random()).collect()
    }

    #[test]
    fn burst_of_changes_is_asked_for_once_and_not_put_off_for_ever() {
        let mut asking = Asking::new(1, ms(0));
        for step in 1..=20 {
            asking.at(step, ms(step * 50));
        }
        // 500 ms after the first change, though it was never calm.
        assert_eq!(asking.due(), Some(ms(1000)));
        let mut asking = Asking::new(1, ms(0));
        asking.at(2, ms(60));
        assert_eq!(asking.due(), Some(ms(160)));
        asking.at(2, ms(150));
        assert_eq!(asking.due(), Some(ms(160)), "nothing has changed");
    }

    #[test]
    fn members_with_a_session_take_turns_from_the_oldest_on() {
        let order = members(3);
        let mut asking = Asking::new(7, ms(0));
        let has_session = |member: &MemberId| *member != order[1];
        assert_eq!(asking.ask(&order, has_session, ms(100)), Some(order[0]));
        assert_eq!(asking.due(), Some(ms(1100)));
        assert_eq!(asking.ask(&order, has_session, ms(1100)), Some(order[2]));
        assert_eq!(asking.ask(&order, has_session, ms(2100)), Some(order[0]));
        assert_eq!(asking.asked(), Some((order[0], 3)));
        // The asked one goes: no waiting.
        asking.detached(order[0], ms(2200));
        assert_eq!(asking.due(), Some(ms(2200)));
        assert_eq!(asking.ask(&order, has_session, ms(2200)), Some(order[2]));
    }

    #[test]
    fn group_without_sessions_waits_for_the_first() {
        let order = members(1);
        let mut asking = Asking::new(7, ms(0));
        assert_eq!(asking.ask(&order, |_| false, ms(100)), None);
        assert_eq!(asking.due(), None);
        asking.attached(ms(900));
        assert_eq!(asking.due(), Some(ms(900)));
        assert_eq!(asking.ask(&order, |_| true, ms(900)), Some(order[0]));
        asking.at(8, ms(1000));
        assert_eq!((asking.asked(), asking.due()), (None, Some(ms(1100))));
    }
}
