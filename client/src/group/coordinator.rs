//! The way to a group's coordinator: the leader of the `__groups` partition that the group's name says.
//!
//! ```text
//!  view lacks __groups --> FindCoordinator at any broker (which makes it) --> view at its index
//!  view has it         --> Route (net/route.rs): leader known, newer hints at once, else back-off
//! ```
//!
//! What is known of coordinators is the view of the cluster: `__groups` is in it like any topic, its
//! leaders are pushed, and a hint is obeyed only with a newer epoch (promise 3, S28). So there is no
//! cache here, and a failover of one coordinator is learned once for all groups of a client.
//!
//! [`ask_coordinator`] is for single calls, [`CoordinatorRoute`] for sessions, which last.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use qute_proto::ids::TopicId;
use qute_proto::partition::partition_of;
use qute_proto::v1::groups_client::GroupsClient;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Response, Status};
use tracing::debug;

use crate::client::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{Leader, Topic};
use crate::net::{
    Address, Lane, Next, Patience, Question, Retry, Route, ask_any, groups_client, until,
};
use crate::trace;

/// The topic that groups live in.
pub(super) const GROUPS_TOPIC: &str = "__groups";

/// Limit of one answer, before the coordinator is looked for anew.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The coordinator of this group.
    Group(Arc<str>),
    /// The coordinator of this partition of `__groups`.
    Partition(u32),
}

/// A coordinator, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Coordinator {
    pub(super) leader: Leader,
    pub(super) address: Address,
}

/// Follows one coordinator.
///
/// ```text
/// loop {
///     let coordinator = route.next(deadline).await?;     // waits, backs off, gives up at the deadline
///     match try it at coordinator.address {
///         an answer                    => route.succeeded(),
///         a typed retriable refusal    => route.refused(&error),
///         no answer, a broken stream   => route.failed(error),
///     }
/// }
/// ```
pub(super) struct CoordinatorRoute {
    shared: Arc<Shared>,
    wanted: Wanted,
    topic: Option<Arc<Topic>>,
    route: Route<()>,
    views: watch::Receiver<u64>,
    failure: Option<Error>,
}

impl CoordinatorRoute {
    pub(super) fn new(shared: Arc<Shared>, wanted: Wanted) -> Self {
        Self {
            route: Route::new(&shared.config),
            views: shared.metadata.subscribe(),
            shared,
            wanted,
            topic: None,
            failure: None,
        }
    }

    /// Where the coordinator is, once that is known and the pause after a failure is over.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline, with the last failure; what keeps any broker from answering
    /// for good.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn next(&mut self, deadline: Instant) -> Result<Coordinator> {
        loop {
            let topic = self.find_topic(deadline).await?;
            let partition = self.partition_in(&topic);
            self.pause(&topic, partition, deadline).await?;
            // Before the view is looked at: a later one ends the pause.
            self.views.mark_unchanged();
            let view = self.shared.metadata.load();
            let connections = &self.shared.connections;
            let next = self.route.find(&view, &topic, partition, |address| {
                connections.refused_until(address)
            });
            match next {
                Next::To { leader, address } => {
                    self.route.open((), leader);
                    return Ok(Coordinator { leader, address });
                }
                Next::Wait { until, why } => {
                    self.shared.metadata.request_refresh();
                    self.failure
                        .get_or_insert_with(|| Error::new(ErrorKind::NoLeader, why));
                    self.route.wait(until, Retry::free());
                }
                // A view without it can't follow one with it (S28), unless brokers disagree on its id.
                Next::TopicMissing => {
                    self.topic = None;
                    self.route.wait(None, Retry::free());
                }
            }
        }
    }

    /// It serves.
    pub(super) fn succeeded(&mut self) {
        self.route.succeeded(self.shared.connections.budget());
        self.failure = None;
    }

    /// It answered that it does not serve now; its hint is obeyed if it is newer.
    pub(super) fn refused(&mut self, error: &v1::Error) {
        if let Some(topic) = &self.topic {
            let partition = self.partition_in(topic);
            let hint = error.leader_hint.as_ref();
            self.shared.metadata.learn(topic, partition, hint);
        }
        self.shared.metadata.request_refresh();
        self.fail(Error::told(error));
    }

    /// There was no answer.
    pub(super) fn failed(&mut self, error: Error) {
        match self.route.leader() {
            // It may be cut off, and what it tells of the cluster old.
            Some(leader) => self
                .shared
                .metadata
                .request_refresh_elsewhere(leader.broker),
            None => self.shared.metadata.request_refresh(),
        }
        self.fail(error);
    }

    /// Resolves when a newer coordinator is known than the one that [`Self::next`] gave.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn deposed(&mut self) {
        let (Some(topic), leader) = (self.topic.clone(), self.route.leader()) else {
            return std::future::pending().await;
        };
        let partition = self.partition_in(&topic);
        loop {
            if (self.shared.metadata).newer_leader(&topic, partition, leader) {
                return;
            }
            if self.views.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// What to report when the deadline has passed.
    pub(super) fn timed_out(&self) -> Error {
        let cause = self.failure.as_ref();
        let last = cause.map(|failure| format!("; last: {failure}"));
        let what = match &self.wanted {
            Wanted::Group(group) => format!("group {group}"),
            Wanted::Partition(partition) => format!("partition {partition} of {GROUPS_TOPIC}"),
        };
        Error::new(
            ErrorKind::Timeout,
            format!(
                "the coordinator of {what} did not answer in time{}",
                last.unwrap_or_default()
            ),
        )
        .with_endpoints(cause.map_or_else(Vec::new, |failure| failure.endpoints().to_vec()))
    }

    fn fail(&mut self, error: Error) {
        debug!(target: trace::GROUP, wanted = ?self.wanted, %error, "not answered by the coordinator");
        self.failure = Some(error);
        let retry = Retry::charged(self.shared.connections.budget());
        match &self.topic {
            Some(topic) => {
                let view = self.shared.metadata.load();
                let partition = self.partition_in(topic);
                self.route.fail(&view, topic, partition, retry);
            }
            None => {
                self.route.wait(None, retry);
            }
        }
    }

    fn partition_in(&self, topic: &Topic) -> u32 {
        match &self.wanted {
            Wanted::Group(group) => partition_of(group.as_bytes(), topic.partitions()),
            Wanted::Partition(partition) => *partition,
        }
    }

    /// Waits until the pause is over, or a newer coordinator is known.
    async fn pause(&mut self, topic: &Topic, partition: u32, deadline: Instant) -> Result<()> {
        while let Some(due) = self.route.due() {
            self.views.mark_unchanged();
            let view = self.shared.metadata.load();
            if self.route.on_view(&view, topic, partition).0 || self.route.on_time(Instant::now()) {
                break;
            }
            if Instant::now() >= deadline {
                return Err(self.timed_out());
            }
            tokio::select! {
                () = until(Some(due.min(deadline))) => {}
                changed = self.views.changed() => if changed.is_err() {
                    until(Some(due.min(deadline))).await;
                }
            }
        }
        Ok(())
    }

    /// `__groups`, made if there has never been a group.
    async fn find_topic(&mut self, deadline: Instant) -> Result<Arc<Topic>> {
        if let Some(topic) = &self.topic {
            return Ok(Arc::clone(topic));
        }
        let found = groups_topic(&self.shared, &self.wanted, deadline).await?;
        self.topic = Some(Arc::clone(&found));
        Ok(found)
    }
}

/// `__groups`, if the cluster has it: a cluster that has never had a group has none.
///
/// # Errors
/// No broker has answered.
pub(super) async fn known_groups_topic(
    shared: &Shared,
    deadline: Instant,
) -> Result<Option<Arc<Topic>>> {
    let metadata = &shared.metadata;
    metadata.first_view(deadline).await?;
    if let Some(topic) = metadata.known_topic(GROUPS_TOPIC) {
        return Ok(Some(topic));
    }
    // A view may be old: the leader of `__cluster` knows.
    metadata.ask_controller(deadline).await?;
    Ok(metadata.known_topic(GROUPS_TOPIC))
}

async fn groups_topic(shared: &Shared, wanted: &Wanted, deadline: Instant) -> Result<Arc<Topic>> {
    let metadata = &shared.metadata;
    metadata.first_view(deadline).await?;
    if let Some(topic) = metadata.known_topic(GROUPS_TOPIC) {
        return Ok(topic);
    }
    let group = match wanted {
        Wanted::Group(group) => group.to_string(),
        // Partitions are asked for by those who know the topic.
        Wanted::Partition(_) => return Err(no_groups_topic()),
    };
    let found = find_coordinator(shared, group, deadline).await?;
    metadata.refresh_to(found.cluster_index, deadline).await?;
    let topic = metadata
        .known_topic(GROUPS_TOPIC)
        .filter(|topic| topic.partitions() > 0)
        .ok_or_else(no_groups_topic)?;
    if TopicId::from_wire(&found.topic_id) == Some(topic.id) {
        metadata.learn(&topic, found.partition, found.leader.as_ref());
    }
    Ok(topic)
}

fn no_groups_topic() -> Error {
    Error::new(
        ErrorKind::NotReady,
        format!("the cluster does not show its topic {GROUPS_TOPIC} yet"),
    )
}

/// Asks any broker.
async fn find_coordinator(
    shared: &Shared,
    group: String,
    deadline: Instant,
) -> Result<v1::FindCoordinatorResponse> {
    let request = v1::FindCoordinatorRequest { group };
    let ask = |address: Address| -> BoxFuture<'_, Result<v1::FindCoordinatorResponse>> {
        let request = request.clone();
        Box::pin(async move {
            let limit = deadline.min(Instant::now() + ANSWER_TIMEOUT);
            let find = async |channel| groups_client(channel).find_coordinator(request).await;
            let asked = shared
                .connections
                .call(&address, Lane::Control, limit, find);
            let response = asked.await?;
            match &response.error {
                Some(error) => Err(Error::told(error)),
                None => Ok(response),
            }
        })
    };
    let endpoints = || shared.metadata.endpoint_classes();
    let question = Question {
        endpoints: &endpoints,
        ask: &ask,
        deadline,
        patience: Patience::Outage,
    };
    ask_any(&shared.config, &shared.connections, question).await
}

/// An answer that may be a refusal.
pub(super) trait Answer: Send + 'static {
    /// Why the whole call was refused.
    fn error(&self) -> Option<&v1::Error>;
}

/// A call to a coordinator.
pub(super) trait Request: Clone + Send + Sync + 'static {
    type Answer: Answer;

    fn ask(self, groups: GroupsClient<Channel>) -> Asking<Self::Answer>;
}

type Asking<R> = BoxFuture<'static, Result<Response<R>, Status>>;

macro_rules! calls {
    ($($call:ident: $request:ident -> $answer:ident,)*) => {
        $(
            impl Answer for v1::$answer {
                fn error(&self) -> Option<&v1::Error> {
                    self.error.as_ref()
                }
            }

            impl Request for v1::$request {
                type Answer = v1::$answer;

                fn ask(self, mut groups: GroupsClient<Channel>) -> Asking<v1::$answer> {
                    Box::pin(async move { groups.$call(self).await })
                }
            }
        )*
    };
}

calls!(
    commit_offsets: CommitOffsetsRequest -> CommitOffsetsResponse,
    fetch_offsets: FetchOffsetsRequest -> FetchOffsetsResponse,
    list_groups: ListGroupsRequest -> ListGroupsResponse,
    describe_group: DescribeGroupRequest -> DescribeGroupResponse,
    reset_offsets: ResetOffsetsRequest -> ResetOffsetsResponse,
    delete_group: DeleteGroupRequest -> DeleteGroupResponse,
);

/// Why a call failed.
#[derive(Debug)]
pub(super) struct CallFailed {
    pub(super) error: Error,
    /// An earlier attempt may have been carried out.
    pub(super) repeated: bool,
}

impl From<CallFailed> for Error {
    fn from(failed: CallFailed) -> Self {
        failed.error
    }
}

/// Asks the coordinator and follows it when it moves. Every call of the `Groups` service but sessions
/// may be repeated: committed offsets don't go back, what is set or deleted stays so.
///
/// # Errors
/// A final refusal as it was told; [`ErrorKind::Timeout`] at the deadline.
///
/// # Cancel safety
/// Cancelled, the call may have been carried out.
pub(super) async fn ask_coordinator<R: Request>(
    shared: &Arc<Shared>,
    wanted: Wanted,
    deadline: Instant,
    request: &R,
) -> Result<R::Answer, CallFailed> {
    let mut route = CoordinatorRoute::new(Arc::clone(shared), wanted);
    let mut repeated = false;
    loop {
        let coordinator = route
            .next(deadline)
            .await
            .map_err(|error| CallFailed { error, repeated })?;
        let limit = deadline.min(Instant::now() + ANSWER_TIMEOUT);
        let request = request.clone();
        let call = move |channel| request.ask(groups_client(channel));
        let connections = &shared.connections;
        let asked = connections.call(&coordinator.address, Lane::Control, limit, call);
        let answer = tokio::select! {
            answer = asked => answer,
            () = route.deposed() => {
                repeated = true;
                route.failed(Error::new(ErrorKind::NoLeader, "it was deposed before it answered"));
                continue;
            }
        };
        let failed = match answer {
            Ok(answer) => {
                let Some(refusal) = answer.error() else {
                    route.succeeded();
                    return Ok(answer);
                };
                let error = Error::told(refusal);
                let unknown = refusal.code() == ErrorCode::OutcomeUnknown;
                route.refused(refusal);
                (error, unknown)
            }
            Err(failed) => {
                route.failed(failed.error.clone());
                (failed.error, !failed.unsent)
            }
        };
        let (error, may_be_done) = failed;
        // A version that has no groups does not get them by being asked again. A connection that breaks
        // may say that something is wrong inside.
        if !error.is_retriable() && error.kind() != ErrorKind::Internal {
            return Err(CallFailed { error, repeated });
        }
        repeated |= may_be_done;
        if Instant::now() >= deadline {
            let error = route.timed_out();
            return Err(CallFailed { error, repeated });
        }
    }
}
