//! Scripted faults: what is to happen to which messages, and how often.
//!
//! Pure: a [`Script`] is asked about each message and says what becomes of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use qute_client::TopicId;
use qute_proto::v1;

use crate::call::Call;
use crate::frames::Message;

type Edit = Arc<dyn Fn(&Message) -> Option<Message> + Send + Sync>;

#[derive(Clone)]
enum Kind {
    /// The request does not reach the broker.
    DropRequest,
    /// The request reaches the broker, its reply does not come back; then the stream is cut.
    DropReply,
    /// The same, and the stream goes on.
    SwallowReply,
    /// The proxy answers instead of the broker.
    Refuse(v1::Error),
    /// Replies are held back.
    Delay(Duration),
    /// Replies are changed.
    Edit(Edit),
}

/// A fault to be injected into a proxy ([`crate::Proxy::inject`]).
///
/// It concerns every message of its call until it is stopped, unless [`Fault::times`],
/// [`Fault::topic`] or [`Fault::partition`] say less.
///
/// ```
/// use std::time::Duration;
/// use qute_test::{Call, Fault, Refusal};
///
/// // The broker writes the batch, the producer does not hear of it.
/// let lost = Fault::drop_reply(Call::Produce).times(1);
/// // "Not me", and no word on who.
/// let refused = Fault::refuse(Call::Produce, Refusal::not_leader()).partition(2).times(3);
/// // The next offsets come late.
/// let late = Fault::delay(Call::ListOffsets, Duration::from_millis(200));
/// ```
#[derive(Clone)]
#[must_use = "a fault does nothing until it is injected"]
pub struct Fault {
    call: Call,
    kind: Kind,
    times: u64,
    topic: Option<TopicId>,
    partition: Option<u32>,
}

impl Fault {
    fn new(call: Call, kind: Kind) -> Self {
        Self {
            call,
            kind,
            times: u64::MAX,
            topic: None,
            partition: None,
        }
    }

    /// The request never reaches the broker, and the stream (or the call) is cut.
    pub fn drop_request(call: Call) -> Self {
        Self::new(call, Kind::DropRequest)
    }

    /// The request reaches the broker and is answered; the answer is lost and the stream (or the
    /// call) is cut.
    pub fn drop_reply(call: Call) -> Self {
        Self::new(call, Kind::DropReply)
    }

    /// The request reaches the broker and is answered; the answer is lost and nothing else
    /// happens: whoever waits for it waits on.
    pub fn swallow_reply(call: Call) -> Self {
        Self::new(call, Kind::SwallowReply)
    }

    /// The proxy refuses the request instead of handing it on. Calls whose answers have no place
    /// for a typed refusal fail with the gRPC code `UNAVAILABLE`.
    pub fn refuse(call: Call, refusal: Refusal) -> Self {
        Self::new(call, Kind::Refuse(refusal.0))
    }

    /// The request is served at once, and each answer is held back for so long. Answers of one
    /// stream keep their order.
    pub fn delay(call: Call, by: Duration) -> Self {
        Self::new(call, Kind::Delay(by))
    }

    /// Each view of the cluster that passes ([`Call::Metadata`] or [`Call::WatchMetadata`]) is
    /// changed by `edit`.
    pub fn edit_metadata(
        call: Call,
        edit: impl Fn(&mut v1::MetadataResponse) + Send + Sync + 'static,
    ) -> Self {
        Self::edit_reply(call, edit)
    }

    /// Each answer of the call is changed by `edit`. `M` is the call's response message; an answer
    /// that is none passes unchanged.
    pub fn edit_reply<M: prost::Message + Default>(
        call: Call,
        edit: impl Fn(&mut M) + Send + Sync + 'static,
    ) -> Self {
        let change = move |message: &Message| {
            let mut reply: M = message.read()?;
            edit(&mut reply);
            Some(Message::plain(reply.encode_to_vec().into()))
        };
        Self::new(call, Kind::Edit(Arc::new(change)))
    }

    /// Only the next `times` messages that it concerns.
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    /// Only messages about this topic ([`Call::Produce`] and [`Call::Fetch`]; other calls it then
    /// does not concern).
    pub fn topic(mut self, topic: TopicId) -> Self {
        self.topic = Some(topic);
        self
    }

    /// Only messages about partitions of this number ([`Call::Produce`] and [`Call::Fetch`];
    /// other calls it then does not concern).
    pub fn partition(mut self, partition: u32) -> Self {
        self.partition = Some(partition);
        self
    }

    fn concerns(&self, call: Call, place: Option<&Place>) -> bool {
        let topic = |id: TopicId| place.and_then(|place| place.topic) == Some(id);
        let partition = |number| place.is_some_and(|place| place.partition == number);
        self.call == call && self.topic.is_none_or(topic) && self.partition.is_none_or(partition)
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.kind {
            Kind::DropRequest => "drop_request",
            Kind::DropReply => "drop_reply",
            Kind::SwallowReply => "swallow_reply",
            Kind::Refuse(_) => "refuse",
            Kind::Delay(_) => "delay",
            Kind::Edit(_) => "edit",
        };
        f.debug_struct("Fault")
            .field("call", &self.call)
            .field("kind", &kind)
            .finish_non_exhaustive()
    }
}

/// How the proxy refuses a request in the broker's place.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal(v1::Error);

impl Refusal {
    /// A refusal of this code.
    #[must_use]
    pub fn new(code: v1::ErrorCode) -> Self {
        Self(v1::Error {
            code: code.into(),
            message: "refused by the test".to_owned(),
            ..v1::Error::default()
        })
    }

    /// "I don't lead this", without a word on who does.
    #[must_use]
    pub fn not_leader() -> Self {
        Self::new(v1::ErrorCode::NotLeader)
    }

    /// Adds a hint: this broker leads, since this epoch. The address may be empty.
    #[must_use]
    pub fn hint(mut self, broker: u64, epoch: u64, address: &str) -> Self {
        self.0.leader_hint = Some(v1::LeaderHint {
            broker_id: broker,
            leader_epoch: epoch,
            address: address.to_owned(),
        });
        self
    }

    /// The refusal as it goes over the wire, to be changed at will.
    pub fn wire(&mut self) -> &mut v1::Error {
        &mut self.0
    }
}

/// A fault that has been injected.
#[derive(Clone, Debug)]
pub struct Injected {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    left: AtomicU64,
    hits: AtomicU64,
}

impl Injected {
    /// How many messages it has hit.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.state.hits.load(Ordering::Acquire)
    }

    /// Ends the fault: what comes from now on passes.
    pub fn stop(&self) {
        self.state.left.store(0, Ordering::Release);
    }
}

impl State {
    /// Uses it once, if it may be used.
    fn hit(&self) -> bool {
        let used = self
            .left
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| {
                left.checked_sub(1)
            });
        if used.is_ok() {
            self.hits.fetch_add(1, Ordering::AcqRel);
        }
        used.is_ok()
    }
}

/// What a message is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) topic: Option<TopicId>,
    pub(crate) partition: u32,
}

/// What becomes of a request.
#[derive(Debug, PartialEq)]
pub(crate) enum RequestFate {
    Pass,
    Cut,
    Refuse(Box<v1::Error>),
}

/// What becomes of a reply.
#[derive(Debug)]
pub(crate) enum ReplyFate {
    /// It goes on, perhaps changed, after so long.
    Pass(Message, Duration),
    /// It is lost, and the stream with it.
    Cut,
    /// It is lost.
    Swallow,
}

/// The faults of a proxy.
#[derive(Debug, Default)]
pub(crate) struct Script {
    rules: Mutex<Vec<(Fault, Arc<State>)>>,
}

impl Script {
    pub(crate) fn add(&self, fault: Fault) -> Injected {
        let state = Arc::new(State {
            left: AtomicU64::new(fault.times),
            hits: AtomicU64::new(0),
        });
        let mut rules = self.rules.lock();
        rules.retain(|(_, state)| state.left.load(Ordering::Acquire) > 0);
        rules.push((fault, Arc::clone(&state)));
        Injected { state }
    }

    /// Ends all faults.
    pub(crate) fn clear(&self) {
        for (_, state) in self.rules.lock().drain(..) {
            state.left.store(0, Ordering::Release);
        }
    }

    /// The first fault that concerns the request decides.
    pub(crate) fn request(&self, call: Call, place: Option<&Place>) -> RequestFate {
        for (fault, state) in &*self.rules.lock() {
            let fate = match &fault.kind {
                Kind::DropRequest => RequestFate::Cut,
                Kind::Refuse(error) => RequestFate::Refuse(Box::new(error.clone())),
                _ => continue,
            };
            if fault.concerns(call, place) && state.hit() {
                return fate;
            }
        }
        RequestFate::Pass
    }

    /// Delays add up, changes follow one another; the first loss ends it.
    pub(crate) fn reply(&self, call: Call, place: Option<&Place>, message: Message) -> ReplyFate {
        let (mut message, mut delay) = (message, Duration::ZERO);
        for (fault, state) in &*self.rules.lock() {
            if matches!(fault.kind, Kind::DropRequest | Kind::Refuse(_))
                || !fault.concerns(call, place)
                || !state.hit()
            {
                continue;
            }
            match &fault.kind {
                Kind::DropReply => return ReplyFate::Cut,
                Kind::SwallowReply => return ReplyFate::Swallow,
                Kind::Delay(by) => delay += *by,
                Kind::Edit(edit) => message = edit(&message).unwrap_or(message),
                Kind::DropRequest | Kind::Refuse(_) => {}
            }
        }
        ReplyFate::Pass(message, delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(partition: u32) -> Place {
        Place {
            topic: None,
            partition,
        }
    }

    #[test]
    fn fault_hits_as_often_as_it_says_and_only_its_partition() {
        let script = Script::default();
        let refusal = Refusal::not_leader().hint(7, 9, "");
        let fault = Fault::refuse(Call::Produce, refusal).partition(2).times(2);
        let injected = script.add(fault);
        let refused = |call, partition| {
            matches!(
                script.request(call, Some(&place(partition))),
                RequestFate::Refuse(error) if error.leader_hint.as_ref().is_some_and(|h| h.broker_id == 7)
            )
        };
        assert!(!refused(Call::Produce, 1));
        assert!(!refused(Call::Fetch, 2));
        assert!(refused(Call::Produce, 2) && refused(Call::Produce, 2));
        assert!(!refused(Call::Produce, 2));
        assert_eq!(injected.hits(), 2);
    }

    #[test]
    fn fault_stopped_lets_everything_pass() {
        let script = Script::default();
        let injected = script.add(Fault::drop_request(Call::Hello));
        assert_eq!(script.request(Call::Hello, None), RequestFate::Cut);
        injected.stop();
        assert_eq!(script.request(Call::Hello, None), RequestFate::Pass);
    }

    #[test]
    fn replies_are_changed_and_delayed_together() {
        let script = Script::default();
        let second = Duration::from_secs(1);
        let _ = script.add(Fault::delay(Call::Metadata, second));
        let _ = script.add(Fault::edit_metadata(Call::Metadata, |view| {
            view.cluster_index = 7;
        }));
        let _ = script.add(Fault::delay(Call::Metadata, second));
        let empty = Message::plain(bytes::Bytes::new());
        let ReplyFate::Pass(message, delay) = script.reply(Call::Metadata, None, empty) else {
            panic!("lost");
        };
        let view: v1::MetadataResponse = message.read().unwrap();
        assert_eq!((view.cluster_index, delay), (7, 2 * second));
    }
}
