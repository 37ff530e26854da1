//! How a group is read.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::MemberId;
use tokio::time::{Instant, timeout_at};

use super::assignor::wire::version_of;
use super::assignor::{Assignor, StickyAssignor};
use super::commit::{CommitMode, Commits};
use super::consumer::GroupConsumer;
use super::core::Core;
use super::membership::{Membership, Settings};
use super::session::Session;
use super::subscription::{Selection, Subscription};
use super::topics::Topics;
use crate::client::{Client, Shared};
use crate::config::capped;
use crate::consumer::{OnDemandPlan, OutOfRange, Position, Prefetch};
use crate::error::{Error, ErrorKind, Result};
use crate::interceptor::{Hooks, Interceptor};

const SESSION_TIMEOUT: Duration = Duration::from_secs(10);
const REVOKE_TIMEOUT: Duration = Duration::from_secs(30);
const PROCESSING_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Prepares a [`GroupConsumer`].
#[derive(Clone)]
#[must_use = "a group is not joined until `join` is called"]
pub struct GroupBuilder {
    shared: Arc<Shared>,
    group: Arc<str>,
    selection: Selection,
    /// The first setting that makes no sense.
    refused: Option<Error>,
    instance: String,
    assignors: Vec<Arc<dyn Assignor>>,
    session_timeout: Duration,
    revoke_timeout: Duration,
    processing_limit: Option<Duration>,
    start: Position,
    commit: CommitMode,
    prefetch_bytes: Option<usize>,
    out_of_range: OutOfRange,
    nearest_replica: bool,
    join_timeout: Option<Duration>,
    hooks: Hooks,
}

impl Client {
    /// Prepares a member of the consumer group of that name; see [`GroupBuilder`].
    pub fn group(&self, name: impl Into<Arc<str>>) -> GroupBuilder {
        GroupBuilder {
            shared: Arc::clone(&self.shared),
            group: name.into(),
            selection: Selection::default(),
            refused: None,
            instance: String::new(),
            assignors: Vec::new(),
            session_timeout: SESSION_TIMEOUT,
            revoke_timeout: REVOKE_TIMEOUT,
            processing_limit: Some(PROCESSING_LIMIT),
            start: Position::Start,
            commit: CommitMode::default(),
            prefetch_bytes: None,
            out_of_range: OutOfRange::Stop,
            nearest_replica: false,
            join_timeout: None,
            hooks: Hooks::default(),
        }
    }
}

impl GroupBuilder {
    /// Reads these topics, besides those named before. They must exist when the group is joined; one that
    /// is deleted and made again later is read again.
    pub fn topics<T: AsRef<str>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        for topic in topics {
            if let Err(error) = self.selection.name(topic.as_ref()) {
                self.refused.get_or_insert(error);
            }
        }
        self
    }

    /// Reads all topics, those that are yet to be made as well, whose names the regular expression
    /// matches somewhere (anchor it with `^` and `$`); besides those named before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: it is none.
    pub fn topics_matching(mut self, pattern: &str) -> Result<Self> {
        self.selection.pattern(pattern)?;
        Ok(self)
    }

    /// A static member: it has this name, and its successor under the same name gets the same partitions
    /// without anything else moving, if it comes within the session timeout. While another lives under the
    /// name, joining waits. Default: none.
    pub fn instance(mut self, name: impl Into<String>) -> Self {
        self.instance = name.into();
        self
    }

    /// Can compute assignments with this one, and likes it less than those named before. A group uses
    /// the first of its oldest member's list that all members have. Default:
    /// [`super::StickyAssignor`] alone.
    pub fn assignor(mut self, assignor: impl Assignor) -> Self {
        self.assignors.push(Arc::new(assignor));
        self
    }

    /// How long the member may be out of touch with its coordinator before others get its partitions; its
    /// own deliveries stop by then. The cluster has bounds for it. Default 10 s.
    pub fn session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = capped(timeout);
        self
    }

    /// How long the program may take to finish what it has of a partition that is to go to another
    /// member. Default 30 s.
    pub fn revoke_timeout(mut self, timeout: Duration) -> Self {
        self.revoke_timeout = capped(timeout);
        self
    }

    /// How long the program may work on what it was handed without asking for the next event or
    /// acknowledging anything. Beyond it the member leaves the group, so that others get on, and joins
    /// again when the program asks for the next event. The session does not depend on it: heartbeats go
    /// on whatever the program does. Default 5 min.
    pub fn processing_limit(mut self, limit: Duration) -> Self {
        self.processing_limit = Some(capped(limit));
        self
    }

    /// The program may take as long as it likes.
    pub fn no_processing_limit(mut self) -> Self {
        self.processing_limit = None;
        self
    }

    /// Where partitions are read from of which the group has committed nothing. The offset found is
    /// committed when reading begins, unless it is the start. Partitions added to a topic, and topics that
    /// appear, while the member reads begin at their start in any case. Default: [`Position::Start`].
    pub fn start(mut self, position: Position) -> Self {
        self.start = position;
        self
    }

    /// When what is acknowledged is committed. Default: every second.
    pub fn commit(mut self, mode: CommitMode) -> Self {
        self.commit = mode;
        self
    }

    /// Bytes fetched ahead of the program, over all topics and brokers; counted as
    /// [`crate::ConsumerBuilder::prefetch_bytes`] does. Default 16 MiB.
    pub fn prefetch_bytes(mut self, bytes: usize) -> Self {
        self.prefetch_bytes = Some(bytes);
        self
    }

    /// What to do when an offset is proven out of range. Default: [`OutOfRange::Stop`].
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// As [`crate::ConsumerBuilder::nearest_replica`]. Default: off.
    pub fn nearest_replica(mut self, nearest: bool) -> Self {
        self.nearest_replica = nearest;
        self
    }

    /// How long [`GroupBuilder::join`] may take. Default: the client's call timeout, and for a static
    /// member the session timeout in addition.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = Some(capped(timeout));
        self
    }

    /// Installs a hook for the records read, within those of the client; see [`Interceptor`] for the
    /// order.
    pub fn interceptor(mut self, hook: impl Interceptor) -> Self {
        self.hooks.install(hook);
        self
    }

    /// Becomes a member of the group. Partitions come as events
    /// ([`super::GroupEvent::Assigned`]).
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for settings that make no sense, [`ErrorKind::InvalidGroupName`],
    /// [`ErrorKind::InvalidTopicName`], [`ErrorKind::UnknownTopic`];
    /// [`ErrorKind::InconsistentAssignor`] if the group's members have no assignor in common with this
    /// one; [`ErrorKind::GroupLimit`]; [`ErrorKind::Timeout`] with what kept the coordinator from
    /// answering.
    ///
    /// # Cancel safety
    /// Dropped, the member leaves in the background, if it had joined already.
    pub async fn join(self) -> Result<GroupConsumer> {
        self.check()?;
        let config = &self.shared.config;
        let waits = match self.instance.is_empty() {
            true => Duration::ZERO,
            false => self.session_timeout,
        };
        let limit = self.join_timeout.unwrap_or(config.call_timeout + waits);
        let deadline = Instant::now() + limit;
        let metadata = &self.shared.metadata;
        metadata.first_view(deadline).await?;
        let mut subscription = Subscription::new(self.selection.clone());
        subscription.update(&metadata.load());
        let missing: Vec<Arc<str>> = subscription.missing().cloned().collect();
        for name in missing {
            metadata.topic(&name, deadline).await?;
        }
        subscription.update(&metadata.load());
        let consumer = self.begin(subscription);
        let core = consumer.core();
        match timeout_at(deadline, core.joined()).await {
            Ok(joined) => joined.map(|()| consumer),
            Err(_) => {
                let cause = core.with(|state| state.last_failure.clone());
                let last = cause.as_ref().map(|error| format!("; last: {error}"));
                let message = format!(
                    "the group {} could not be joined in time{}",
                    self.group,
                    last.unwrap_or_default()
                );
                let endpoints = cause.map(|error| error.endpoints().to_vec());
                Err(Error::new(ErrorKind::Timeout, message)
                    .with_endpoints(endpoints.unwrap_or_default()))
            }
        }
    }

    fn check(&self) -> Result<()> {
        if let Some(error) = &self.refused {
            return Err(error.clone());
        }
        qute_proto::group::check_name(&self.group).map_err(|error| {
            Error::new(ErrorKind::InvalidGroupName, error.to_string()).with_cause(&error)
        })?;
        if self.selection.is_empty() {
            return Err(Error::config("a group reads topics: name some"));
        }
        let zero = [
            ("session_timeout", Some(self.session_timeout)),
            ("processing_limit", self.processing_limit),
            ("join_timeout", self.join_timeout),
        ];
        for (name, value) in zero {
            if value.is_some_and(|value| value.is_zero()) {
                return Err(Error::config(format!("{name} is 0: it should be above")));
            }
        }
        Ok(())
    }

    /// Begins the member's task.
    fn begin(&self, subscription: Subscription) -> GroupConsumer {
        let assignors = match self.assignors.as_slice() {
            [] => vec![Arc::new(StickyAssignor) as Arc<dyn Assignor>],
            some => some.to_vec(),
        };
        let config = &self.shared.config;
        let settings = Settings {
            group: self.group.to_string(),
            instance: self.instance.clone(),
            rack: config.rack.clone().unwrap_or_default(),
            client: config.client_name.clone(),
            assignors: assignors.iter().map(|it| version_of(it.as_ref())).collect(),
            session_timeout: self.session_timeout,
            revoke_timeout: self.revoke_timeout,
            processing_limit: self.processing_limit,
            by_hand: self.commit == CommitMode::Manual,
        };
        let topics = subscription.to_wire();
        let membership = Membership::new(MemberId::random(), settings, topics, Instant::now());
        let core = Arc::new(Core::new(
            Arc::clone(&self.shared),
            Arc::clone(&self.group),
            !self.instance.is_empty(),
            membership,
            Commits::new(self.commit),
        ));
        let plan = OnDemandPlan {
            prefetch: Prefetch::new(self.prefetch_bytes),
            topics: 1,
            out_of_range: self.out_of_range,
            rack: config.rack.clone().filter(|_| self.nearest_replica),
            hooks: config.hooks.around(&self.hooks),
        };
        let topics = Topics::new(&core, subscription, plan, self.start);
        let interval = match self.commit {
            CommitMode::Auto { interval } => Some(interval),
            CommitMode::Manual => None,
        };
        let session = Session::new(&core, topics, assignors, interval);
        tokio::spawn(session.run());
        GroupConsumer::new(core)
    }
}

impl fmt::Debug for GroupBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupBuilder")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}
