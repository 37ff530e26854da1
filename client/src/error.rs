//! The one error type of the client.
//!
//! An [`Error`] says what happened ([`ErrorKind`]), where (topic, partition, offset, endpoint),
//! whether trying again can help, and for writes what became of the record ([`Outcome`]).

use std::fmt;
use std::sync::Arc;

use qute_proto::batch::BatchError;
use qute_proto::topic::TopicNameError;
use qute_proto::v1::{self, ErrorCode};

use crate::record::ConsumedRecord;

/// The result of the client's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What happened, and what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting or the bootstrap list makes no sense: correct it.
    Config,
    /// No broker could be reached; [`Error::endpoints`] says why for each. Check addresses and
    /// network; the same call later may work.
    Unreachable,
    /// The deadline passed. Try again, with a longer one if the cluster is slow or recovering.
    Timeout,
    /// The topic does not exist; the leader of `__cluster` says so. Create it, or correct the name.
    UnknownTopic,
    /// The topic has no such partition. Partitions are numbered from 0.
    UnknownPartition,
    /// A topic of that name exists: use it, or delete it first.
    TopicExists,
    /// The name breaks the rules of topic names (see [`crate::TopicSpec::name`]): choose another.
    InvalidTopicName,
    /// An argument is out of its range: correct it.
    InvalidArgument,
    /// The record is larger than the client, the broker or the topic allows: split it, or raise
    /// the topic's `record_bytes_max`.
    RecordTooLarge,
    /// The batch is larger than the broker allows: make batches smaller.
    BatchTooLarge,
    /// A batch failed its checksum or can't be decoded. Reading it again may help if it was
    /// damaged on the way; otherwise the stored batch is damaged: skip it knowingly, or restore it.
    CorruptBatch,
    /// The offset lies outside what the partition holds; see [`Error::bounds`]. Choose where to go
    /// on: what lay between is gone (retention).
    OffsetOutOfRange,
    /// No leader answered. The client follows elections by itself; try again later.
    NoLeader,
    /// The broker or the cluster is not ready to serve (starting, forming). Try again later.
    NotReady,
    /// The broker has no space left that it could promise. Try again later, and give it space or
    /// shorten retention.
    StorageFull,
    /// The partition has forgotten this producer's sequence; writing went on under a new epoch.
    /// [`Error::outcome`] says whether sending the record again can double it.
    ProducerReset,
    /// The record is stored, but its offset is no longer known. Nothing to do unless you need the
    /// offset.
    OffsetUnknown,
    /// The request was handed over and its fate is not known. Look before you repeat it, unless
    /// repeating is harmless.
    OutcomeUnknown,
    /// The broker belongs to another cluster than the one that this client began with: correct the
    /// addresses, or make a new client if the cluster was replaced.
    WrongCluster,
    /// The replica found damage in its log and does not serve. Another replica may; the broker's
    /// log says more.
    ReplicaQuarantined,
    /// There are fewer brokers alive than replicas asked for: ask for fewer, or start brokers.
    NotEnoughBrokers,
    /// The broker holds as much as it may. Slow down and try again.
    Overloaded,
    /// A hook of the program refused the record ([`crate::Interceptor`]); [`Error::message`] is
    /// what it said.
    Intercepted,
    /// A value could not be encoded or decoded by the program's codec: the data or the codec is
    /// wrong; the record itself is intact.
    Serde,
    /// The topic was deleted and made again: what a handle knew of it (offsets, sequences) belongs
    /// to the one that is gone. Open the handle anew, from a position that makes sense there.
    TopicRecreated,
    /// There is no such group: check the name.
    UnknownGroup,
    /// The membership is over: the session was lost, or a newer one of the same member has begun.
    /// Join anew.
    UnknownMember,
    /// The partition is claimed by another member, or under a newer epoch: what was to be committed
    /// belongs to whoever holds it now.
    ClaimFenced,
    /// The member has no assignor in common with the group: give it one of those the message names.
    InconsistentAssignor,
    /// The group has members, or live claims on what the call would change: stop them first.
    GroupNotEmpty,
    /// The broker keeps no more groups, members or offsets: delete some, or raise its limits.
    GroupLimit,
    /// The group has gone on to another generation. Nothing to do.
    StaleGeneration,
    /// The group name breaks the naming rules: choose another.
    InvalidGroupName,
    /// The group has committed an offset beyond the one that was to be committed, and committed
    /// offsets go back by a reset only.
    OffsetBehind,
    /// The program worked on what it was handed for longer than its processing limit, and the member has
    /// left the group. It joins again when the program asks for the next event; give it more time, or
    /// smaller batches.
    ProcessingLimit,
    /// What the group's members are to read could not be settled anew: an assignor of the program failed,
    /// or the coordinator refused what was asked (the source says why). What the member reads goes on;
    /// what is new is read by nobody until the cause is gone. Correct the assignor, read less in this
    /// group, or raise the broker's limits.
    NotAssigned,
    /// A handler of the program failed on a record as often as it is tried; [`Error::record`] is that
    /// record, the source what the handler said. Correct the handler, or have such records set aside
    /// ([`crate::group::RunPolicy::dead_letters`]).
    HandlerFailed,
    /// The handle was closed or dropped, or the runtime that it was made in has ended: make a new one.
    Closed,
    /// The broker sent something that this client does not understand: bring both to versions that
    /// go together.
    Protocol,
    /// A fault inside the broker; its log says more. Worth a bug report.
    Internal,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is stored.
    Ok,
    /// It is not stored and will not be.
    NotWritten,
    /// It may or may not be stored, now or later.
    Unknown,
}

/// A half-open range of readable offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OffsetBounds {
    /// First readable offset.
    pub log_start_offset: u64,
    /// One past the last readable offset.
    pub high_watermark: u64,
}

impl OffsetBounds {
    pub(crate) fn told(bounds: v1::OffsetBounds) -> Self {
        Self {
            log_start_offset: bounds.log_start_offset,
            high_watermark: bounds.high_watermark,
        }
    }
}

/// Why an endpoint could not serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointFailure {
    /// `host:port`.
    pub endpoint: String,
    /// The cause, for people.
    pub cause: String,
}

/// An error of the client. Cheap to clone.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    retriable: bool,
    outcome: Option<Outcome>,
    topic: Option<Arc<str>>,
    partition: Option<u32>,
    offset: Option<u64>,
    bounds: Option<OffsetBounds>,
    endpoints: Vec<EndpointFailure>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    record: Option<Arc<ConsumedRecord>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            retriable: kind.is_retriable(),
            outcome: None,
            topic: None,
            partition: None,
            offset: None,
            bounds: None,
            endpoints: Vec::new(),
            source: None,
            record: None,
        }))
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    pub(crate) fn closed(what: &str) -> Self {
        Self::new(ErrorKind::Closed, format!("the {what} is closed"))
    }

    /// Of a handle whose task is being dropped, though nobody has closed it. To be called while that
    /// happens.
    pub(crate) fn task_ended(what: &str) -> Self {
        let message = match std::thread::panicking() {
            true => format!("the {what}'s task panicked"),
            false => format!(
                "the {what}'s task ended with its runtime: make a new client in one that lives on"
            ),
        };
        Self::new(ErrorKind::Closed, message)
    }

    fn edit(mut self, edit: impl FnOnce(&mut Inner)) -> Self {
        edit(Arc::make_mut(&mut self.0));
        self
    }

    pub(crate) fn with_outcome(self, outcome: Outcome) -> Self {
        self.edit(|inner| inner.outcome = Some(outcome))
    }

    pub(crate) fn with_topic(self, topic: &Arc<str>) -> Self {
        self.edit(|inner| inner.topic = Some(Arc::clone(topic)))
    }

    pub(crate) fn at(self, topic: &Arc<str>, partition: u32) -> Self {
        self.with_topic(topic)
            .edit(|inner| inner.partition = Some(partition))
    }

    pub(crate) fn with_offset(self, offset: u64) -> Self {
        self.edit(|inner| inner.offset = Some(offset))
    }

    pub(crate) fn with_bounds(self, bounds: Option<OffsetBounds>) -> Self {
        self.edit(|inner| inner.bounds = bounds)
    }

    pub(crate) fn with_endpoints(self, endpoints: Vec<EndpointFailure>) -> Self {
        self.edit(|inner| inner.endpoints = endpoints)
    }

    /// Keeps a foreign error as what it says, cause by cause: its type is no part of this API.
    pub(crate) fn with_cause(self, error: &dyn std::error::Error) -> Self {
        let cause = Cause::of(error);
        self.edit(|inner| inner.source = Some(Arc::new(cause)))
    }

    /// Keeps an error of the program's own (of a hook, of a codec) as it is.
    pub(crate) fn with_boxed_source(
        self,
        source: Box<dyn std::error::Error + Send + Sync>,
    ) -> Self {
        self.edit(|inner| inner.source = Some(source.into()))
    }

    pub(crate) fn with_record(self, record: ConsumedRecord) -> Self {
        self.edit(|inner| inner.record = Some(Arc::new(record)))
    }

    /// What happened.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether doing the same again later can help.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        self.0.retriable
    }

    /// For writes: what became of the record. `None` for everything else.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.0.outcome
    }

    /// The topic that it is about.
    #[must_use]
    pub fn topic(&self) -> Option<&str> {
        self.0.topic.as_deref()
    }

    /// The partition that it is about.
    #[must_use]
    pub fn partition(&self) -> Option<u32> {
        self.0.partition
    }

    /// The offset that it is about.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// With [`ErrorKind::OffsetOutOfRange`]: what may be read.
    #[must_use]
    pub fn bounds(&self) -> Option<OffsetBounds> {
        self.0.bounds
    }

    /// The endpoints that were tried, each with its cause.
    #[must_use]
    pub fn endpoints(&self) -> &[EndpointFailure] {
        &self.0.endpoints
    }

    /// With [`ErrorKind::Serde`] and [`ErrorKind::Intercepted`] of a record that was read: the
    /// record, to look at or to send to a dead-letter topic.
    #[must_use]
    pub fn record(&self) -> Option<&ConsumedRecord> {
        self.0.record.as_deref()
    }

    /// What it says without the place and the endpoints.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl ErrorKind {
    fn is_retriable(self) -> bool {
        matches!(
            self,
            Self::Unreachable
                | Self::Timeout
                | Self::NoLeader
                | Self::NotReady
                | Self::StorageFull
                | Self::ProducerReset
                | Self::OutcomeUnknown
                | Self::ReplicaQuarantined
                | Self::NotEnoughBrokers
                | Self::Overloaded
        )
    }
}

/// Of a topic's name, in what an error says.
const NAME_CHARS_MAX: usize = qute_proto::topic::NAME_BYTES_MAX;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        if let Some(topic) = &inner.topic {
            // No topic has a longer name: whatever this is, its beginning tells.
            match topic.char_indices().nth(NAME_CHARS_MAX) {
                None => write!(f, "topic {topic}")?,
                Some((end, _)) => write!(f, "topic {}...", topic.get(..end).unwrap_or_default())?,
            }
            if let Some(partition) = inner.partition {
                write!(f, " partition {partition}")?;
            }
            if let Some(offset) = inner.offset {
                write!(f, " offset {offset}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&inner.message)?;
        if let Some(bounds) = inner.bounds {
            write!(
                f,
                " (readable: {} up to, not including, {})",
                bounds.log_start_offset, bounds.high_watermark
            )?;
        }
        for (number, failure) in inner.endpoints.iter().enumerate() {
            let separator = if number == 0 { ": " } else { "; " };
            write!(f, "{separator}{}: {}", failure.endpoint, failure.cause)?;
        }
        match inner.outcome {
            Some(Outcome::Ok) => f.write_str(" (stored)"),
            Some(Outcome::NotWritten) => f.write_str(" (not written)"),
            Some(Outcome::Unknown) => f.write_str(" (outcome unknown: it may have been written)"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.kind())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0
            .source
            .as_deref()
            .map(|source| source as &(dyn std::error::Error + 'static))
    }
}

/// What a foreign error said.
#[derive(Debug)]
struct Cause {
    text: String,
    source: Option<Box<Cause>>,
}

/// Longer chains of causes are cut.
const CAUSES_MAX: usize = 16;

impl Cause {
    fn of(error: &dyn std::error::Error) -> Self {
        let mut texts = vec![error.to_string()];
        let mut next = error.source();
        while let Some(error) = next
            && texts.len() < CAUSES_MAX
        {
            texts.push(error.to_string());
            next = error.source();
        }
        let last = Self {
            text: texts.pop().unwrap_or_default(),
            source: None,
        };
        texts.into_iter().rev().fold(last, |source, text| Self {
            text,
            source: Some(Box::new(source)),
        })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source
            .as_deref()
            .map(|source| source as &(dyn std::error::Error + 'static))
    }
}

/// What other layers' errors mean. Functions instead of `From`: foreign types stay out of the
/// public API.
impl Error {
    pub(crate) fn topic_name(error: &TopicNameError) -> Self {
        Self::new(ErrorKind::InvalidTopicName, error.to_string()).with_cause(error)
    }

    pub(crate) fn batch(error: &BatchError) -> Self {
        let kind = match error {
            BatchError::RecordTooLarge { .. } | BatchError::TooManyHeaders { .. } => {
                ErrorKind::RecordTooLarge
            }
            BatchError::BatchTooLarge { .. } => ErrorKind::BatchTooLarge,
            _ => ErrorKind::CorruptBatch,
        };
        Self::new(kind, error.to_string()).with_cause(error)
    }

    /// A call that failed as a whole.
    pub(crate) fn status(status: &tonic::Status) -> Self {
        use tonic::Code;
        let kind = match status.code() {
            Code::DeadlineExceeded => ErrorKind::Timeout,
            Code::Unimplemented | Code::InvalidArgument | Code::OutOfRange => ErrorKind::Protocol,
            Code::ResourceExhausted => ErrorKind::Overloaded,
            Code::FailedPrecondition => ErrorKind::WrongCluster,
            Code::Internal | Code::DataLoss => ErrorKind::Internal,
            // `Unknown` and `Cancelled` can mean a dead connection as well.
            _ => ErrorKind::Unreachable,
        };
        Self::new(kind, cause_of(status)).with_cause(status)
    }

    /// A broker's typed refusal.
    pub(crate) fn told(error: &v1::Error) -> Self {
        let kind = match error.code() {
            ErrorCode::NotLeader => ErrorKind::NoLeader,
            ErrorCode::UnknownTopic => ErrorKind::UnknownTopic,
            ErrorCode::UnknownPartition => ErrorKind::UnknownPartition,
            ErrorCode::OffsetOutOfRange => ErrorKind::OffsetOutOfRange,
            ErrorCode::RecordTooLarge => ErrorKind::RecordTooLarge,
            ErrorCode::BatchTooLarge => ErrorKind::BatchTooLarge,
            ErrorCode::CorruptBatch => ErrorKind::CorruptBatch,
            ErrorCode::StorageFull => ErrorKind::StorageFull,
            ErrorCode::InvalidTopicName => ErrorKind::InvalidTopicName,
            ErrorCode::TopicExists => ErrorKind::TopicExists,
            ErrorCode::InvalidArgument => ErrorKind::InvalidArgument,
            ErrorCode::UnknownProducer
            | ErrorCode::OutOfOrderSequence
            | ErrorCode::ProducerFenced => ErrorKind::ProducerReset,
            ErrorCode::NotReady => ErrorKind::NotReady,
            ErrorCode::OutcomeUnknown => ErrorKind::OutcomeUnknown,
            ErrorCode::WrongCluster => ErrorKind::WrongCluster,
            ErrorCode::ReplicaQuarantined => ErrorKind::ReplicaQuarantined,
            ErrorCode::NotEnoughBrokers => ErrorKind::NotEnoughBrokers,
            ErrorCode::Overloaded => ErrorKind::Overloaded,
            ErrorCode::DuplicateSequence => ErrorKind::OffsetUnknown,
            ErrorCode::UnknownGroup => ErrorKind::UnknownGroup,
            ErrorCode::UnknownMember => ErrorKind::UnknownMember,
            ErrorCode::ClaimFenced => ErrorKind::ClaimFenced,
            ErrorCode::InconsistentAssignor => ErrorKind::InconsistentAssignor,
            ErrorCode::GroupNotEmpty => ErrorKind::GroupNotEmpty,
            ErrorCode::GroupLimit => ErrorKind::GroupLimit,
            ErrorCode::StaleGeneration => ErrorKind::StaleGeneration,
            ErrorCode::InvalidGroupName => ErrorKind::InvalidGroupName,
            ErrorCode::Internal | ErrorCode::Unspecified => ErrorKind::Internal,
        };
        let message = if error.message.is_empty() {
            error.code().as_str_name().to_owned()
        } else {
            error.message.clone()
        };
        Self::new(kind, message).with_bounds(error.bounds.map(OffsetBounds::told))
    }
}

/// What a status says, with the innermost cause (where "connection refused" stands).
pub(crate) fn cause_of(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
    let mut innermost = None;
    while let Some(error) = cause {
        innermost = Some(error.to_string());
        cause = error.source();
    }
    if let Some(innermost) = innermost
        && !text.contains(&innermost)
    {
        if text.is_empty() || text == "transport error" || text == "tcp connect error" {
            text = innermost;
        } else {
            text = format!("{text}: {innermost}");
        }
    }
    if text.is_empty() {
        text = status.code().description().to_owned();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn error_of_a_foreign_kind_keeps_what_it_said_and_not_its_type() {
        let io = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "refused by the host");
        let mut status = tonic::Status::unavailable("tcp connect error");
        status.set_source(Arc::new(io));
        let error = Error::status(&status);
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(error.message(), "refused by the host");
        let source = error.source().unwrap();
        assert!(!source.is::<tonic::Status>());
        assert!(source.to_string().contains("tcp connect error"));
        let innermost = source.source().unwrap();
        assert!(!innermost.is::<std::io::Error>());
        assert_eq!(innermost.to_string(), "refused by the host");
    }

    #[test]
    fn error_about_a_topic_of_an_endless_name_shows_its_beginning() {
        let about = |name: String| {
            Error::new(ErrorKind::UnknownTopic, "no")
                .with_topic(&name.into())
                .to_string()
        };
        assert_eq!(
            about("x".repeat(249)),
            format!("topic {}: no", "x".repeat(249))
        );
        let long = about("\u{e9}".repeat(1 << 20));
        assert_eq!(long, format!("topic {}...: no", "\u{e9}".repeat(249)));
    }

    #[test]
    fn error_with_an_endless_chain_of_causes_is_cut() {
        #[derive(Debug)]
        struct Endless;
        impl fmt::Display for Endless {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("again")
            }
        }
        impl std::error::Error for Endless {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                Some(&Endless)
            }
        }
        let error = Error::config("x").with_cause(&Endless);
        let mut depth = 0;
        let mut next = error.source();
        while let Some(cause) = next {
            depth += 1;
            next = cause.source();
        }
        assert_eq!(depth, CAUSES_MAX);
    }

    #[test]
    fn error_says_place_endpoints_bounds_and_outcome() {
        let topic: Arc<str> = "t".into();
        let error = Error::new(ErrorKind::OffsetOutOfRange, "gone")
            .at(&topic, 3)
            .with_offset(7)
            .with_bounds(Some(OffsetBounds {
                log_start_offset: 10,
                high_watermark: 20,
            }))
            .with_endpoints(vec![EndpointFailure {
                endpoint: "a:1".to_owned(),
                cause: "refused".to_owned(),
            }])
            .with_outcome(Outcome::NotWritten);
        assert_eq!(
            error.to_string(),
            "topic t partition 3 offset 7: gone (readable: 10 up to, not including, 20): a:1: \
             refused (not written)"
        );
        assert_eq!(
            (error.topic(), error.partition(), error.offset()),
            (Some("t"), Some(3), Some(7))
        );
    }

    #[test]
    fn error_codes_of_brokers_have_kinds_of_their_own_but_for_faults() {
        let mut faults = Vec::new();
        for code in 0..=64 {
            let Ok(code) = ErrorCode::try_from(code) else {
                continue;
            };
            let told = Error::told(&v1::Error {
                code: code.into(),
                ..Default::default()
            });
            assert!(!told.message().is_empty());
            if told.kind() == ErrorKind::Internal {
                faults.push(code);
            }
        }
        assert_eq!(faults, [ErrorCode::Unspecified, ErrorCode::Internal]);
    }
}
