//! One session's stream: a join first, then whatever the member does; answers, acknowledgements and
//! updates the other way.
//!
//! One task per stream:
//!
//! ```text
//!  first message   coordinator found   joined, or waits for a stable name   confirmed by a round
//!  ------------> join ------------> joining ---------------------------> member ------------> told
//!     |             |                  |                                   |
//!     '-------------+------------------+-- refused, coordinator ends ------+--> error, end of stream
//!                                                                          '-- leave --> done, end
//! ```
//!
//! Memory is bounded: commands wait in a short queue, behind which no request is read; what the
//! coordinator has to say is kept once, the latest of each kind ([`crate::groups::coordinator::mailbox`]).
//! Heartbeats overtake the member's own commands, or a slow command would cost it its session.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{Stream, StreamExt};
use prost::Message as _;
use qute_proto::v1::session_request::Request;
use qute_proto::v1::session_response::Response;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::{ANSWER_BYTES_MAX, Shared, check};
use crate::controller::proposer::error;
use crate::groups::coordinator::mailbox::Letters;
use crate::groups::{Member, Seat};

/// How long a stream may be open without a join.
const JOIN_WITHIN: Duration = Duration::from_secs(10);
/// Commands and their outcomes that one stream holds; behind them nothing is read.
const QUEUED_MAX: usize = 32;

type Answers = mpsc::Sender<Result<v1::SessionResponse, Status>>;
type Requests = Streaming<v1::SessionRequest>;

/// Runs one stream until the session ends, the client is gone, or the broker stops.
pub(super) async fn run(shared: Arc<Shared>, mut requests: Requests, answers: Answers) {
    let stop = shared.stop.clone();
    let session = async {
        let member = match begin(&shared, &mut requests).await {
            Ok(Some(member)) => member,
            Ok(None) => return,
            Err(NoMember::Refused(refused)) => {
                return say(&answers, Response::Error(refused)).await;
            }
            Err(NoMember::Broken(status)) => return end(&answers, status).await,
        };
        Session::new(member).serve(&mut requests, &answers).await;
    };
    tokio::select! {
        () = session => {}
        () = stop.cancelled() => {
            let text = "this broker is stopping: look for the coordinator anew";
            let last = response(Response::Error(error(ErrorCode::NotReady, text)));
            // A reader that is slow learns it from the end of the stream.
            let _ = answers.try_send(Ok(last));
        }
    }
}

fn response(response: Response) -> v1::SessionResponse {
    v1::SessionResponse {
        response: Some(response),
    }
}

async fn say(answers: &Answers, what: Response) {
    // The client may be gone.
    let _ = answers.send(Ok(response(what))).await;
}

/// The stream can't be read any further; the client may be gone, or speak in riddles.
async fn end(answers: &Answers, status: Status) {
    let _ = answers.send(Err(status)).await;
}

/// Why nobody has joined.
enum NoMember {
    Refused(v1::Error),
    Broken(Status),
}

impl From<v1::Error> for NoMember {
    fn from(refused: v1::Error) -> Self {
        Self::Refused(refused)
    }
}

/// Until the member has joined. `None`: the client is gone.
async fn begin(shared: &Shared, requests: &mut Requests) -> Result<Option<Member>, NoMember> {
    let Some(join) = first_join(requests).await? else {
        return Ok(None);
    };
    check::join(&join, shared.coordinators.limits())?;
    let joining = async {
        let coordinator = shared.coordinator_of(&join.group).await?;
        coordinator.join(&join).await
    };
    tokio::pin!(joining);
    loop {
        tokio::select! {
            joined = &mut joining => return Ok(Some(joined?)),
            // S27: one that waits for a stable name gives its place up by going away.
            request = requests.next() => match request.transpose().map_err(NoMember::Broken)? {
                None => return Ok(None),
                Some(request) => match request.request {
                    Some(Request::Leave(_)) => return Ok(None),
                    Some(Request::Heartbeat(_)) | None => {}
                    Some(_) => return Err(not_joined("the member has not joined yet").into()),
                },
            },
        }
    }
}

/// What a stream begins with. `None`: the client is gone.
async fn first_join(
    requests: &mut (impl Stream<Item = Result<v1::SessionRequest, Status>> + Unpin),
) -> Result<Option<v1::Join>, NoMember> {
    let Ok(first) = tokio::time::timeout(JOIN_WITHIN, requests.next()).await else {
        // A lossy line delays it: that is no mistake of the client's, and must not end it.
        let text = "no join came for a while: open another stream";
        return Err(error(ErrorCode::NotReady, text).into());
    };
    let Some(first) = first else {
        return Ok(None);
    };
    match first.map_err(NoMember::Broken)?.request {
        Some(Request::Join(join)) => Ok(Some(join)),
        _ => Err(not_joined("another message came first").into()),
    }
}

fn not_joined(why: &str) -> v1::Error {
    let text = format!("a session begins with a join, and waits for its answer: {why}");
    error(ErrorCode::InvalidArgument, text)
}

/// The outcome of one command.
struct Outcome {
    done: v1::Done,
    /// It was the last one.
    is_leave: bool,
}

/// What the member has asked for. It is carried out, whether the member is there to hear of it or not.
#[derive(Default)]
struct Work {
    /// One after the other, in the order they came.
    queue: VecDeque<BoxFuture<'static, Outcome>>,
    running: FuturesUnordered<BoxFuture<'static, Outcome>>,
    outcomes: VecDeque<v1::Done>,
    /// Nobody hears of outcomes.
    is_unheard: bool,
    /// The member has left.
    has_left: bool,
}

impl Work {
    /// Waits until a command has been carried out; for ever if there is none.
    ///
    /// # Cancel safety
    /// Safe: what has begun goes on with the next call.
    async fn progress(&mut self) {
        if self.running.is_empty()
            && let Some(next) = self.queue.pop_front()
        {
            self.running.push(next);
        }
        let Some(outcome) = self.running.next().await else {
            return std::future::pending().await;
        };
        self.has_left |= outcome.is_leave;
        if !self.is_unheard {
            self.outcomes.push_back(outcome.done);
        }
    }

    /// The client is gone.
    fn hear_no_more(&mut self) {
        self.is_unheard = true;
        self.outcomes.clear();
    }

    /// Nothing is left to do or to tell.
    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty() && self.outcomes.is_empty()
    }
}

struct Session {
    member: Member,
    is_told: bool,
    letters: Letters,
    work: Work,
    /// Nothing more is read.
    is_deaf: bool,
    /// Why, if the stream could not be read.
    broken: Option<Status>,
}

impl Session {
    fn new(member: Member) -> Self {
        Self {
            member,
            is_told: false,
            letters: Letters::default(),
            work: Work::default(),
            is_deaf: false,
            broken: None,
        }
    }

    async fn serve(mut self, requests: &mut Requests, answers: &Answers) {
        let mailbox = Arc::clone(self.member.mailbox());
        loop {
            if self.is_over() {
                if let Some(status) = self.broken.take() {
                    end(answers, status).await;
                }
                return;
            }
            tokio::select! {
                request = requests.next(), if self.may_read() => match request {
                    Some(Ok(request)) => {
                        if let Err(refused) = self.request(request) {
                            return say(answers, Response::Error(refused)).await;
                        }
                    }
                    // What was asked for is carried out all the same.
                    Some(Err(status)) => (self.is_deaf, self.broken) = (true, Some(status)),
                    None => self.is_deaf = true,
                },
                () = self.work.progress() => {}
                () = mailbox.arrived() => self.take(mailbox.take()),
                room = answers.reserve(), if self.has_something_to_say() => {
                    let Ok(room) = room else {
                        // S27: what was asked for is carried out all the same, a leave above all.
                        self.is_deaf = true;
                        self.work.hear_no_more();
                        continue;
                    };
                    let Some(next) = self.next_answer() else { continue };
                    let is_last = matches!(next, Response::Error(_));
                    room.send(Ok(response(next)));
                    if is_last {
                        return;
                    }
                }
            }
        }
    }

    fn may_read(&self) -> bool {
        !self.is_deaf && self.work.queue.len() + self.work.outcomes.len() < QUEUED_MAX
    }

    /// Nothing is left to do or to say.
    fn is_over(&self) -> bool {
        self.work.is_idle() && (self.work.has_left || self.is_deaf)
    }

    fn take(&mut self, new: Letters) {
        self.letters.joined |= new.joined;
        self.letters.concerned |= new.concerned;
        self.letters.heartbeat = new.heartbeat.or(self.letters.heartbeat);
        self.letters.ended = self.letters.ended.take().or(new.ended);
    }

    fn has_something_to_say(&self) -> bool {
        if self.work.is_unheard {
            return false;
        }
        let letters = &self.letters;
        !self.work.outcomes.is_empty()
            || letters.joined
            || (self.is_told && (letters.concerned || letters.heartbeat.is_some()))
            || (letters.ended.is_some() && !self.is_deaf)
    }

    fn next_answer(&mut self) -> Option<Response> {
        if std::mem::take(&mut self.letters.joined) {
            self.is_told = true;
            return Some(Response::Joined(self.member.joined()));
        }
        if let Some(done) = self.work.outcomes.pop_front() {
            return Some(Response::Done(done));
        }
        if self.is_told {
            if let Some(sequence) = self.letters.heartbeat.take() {
                return Some(Response::Heartbeat(v1::HeartbeatAck { sequence }));
            }
            if std::mem::take(&mut self.letters.concerned)
                && let Some(update) = self.member.update()
            {
                return Some(Response::Update(fitted(update)));
            }
        }
        if self.is_deaf {
            // It is over anyway, once what was asked for is done.
            return None;
        }
        self.letters.ended.take().map(Response::Error)
    }

    /// # Errors
    /// The stream can't go on.
    fn request(&mut self, request: v1::SessionRequest) -> Result<(), v1::Error> {
        let Some(request) = request.request else {
            // A kind of request that this broker does not know yet.
            return Ok(());
        };
        let seat = self.member.seat().clone();
        match request {
            Request::Join(_) => {
                let text = "a stream has one join: open another for another membership";
                return Err(error(ErrorCode::InvalidArgument, text));
            }
            Request::Heartbeat(heartbeat) => self.member.heartbeat(heartbeat.sequence),
            Request::Topics(subscribed) => {
                let checked = check::subscriptions(&subscribed.topics);
                let work = async move {
                    checked?;
                    seat.subscribe(subscribed.topics).await
                };
                self.enqueue(subscribed.correlation_id, false, work);
            }
            Request::Publish(publish) => {
                let checked = check::publish(&publish);
                let correlation_id = publish.correlation_id;
                let work = async move {
                    checked?;
                    seat.publish(publish.generation, publish.assignment).await
                };
                self.enqueue(correlation_id, false, work);
            }
            Request::Release(release) => {
                let checked = check::releases(&release.claims);
                let work = async move {
                    checked?;
                    seat.release(release.claims).await
                };
                self.enqueue(release.correlation_id, false, work);
            }
            Request::Leave(leave) => {
                self.is_deaf = true;
                let correlation_id = leave.correlation_id;
                self.enqueue(correlation_id, true, go(seat, leave));
            }
        }
        Ok(())
    }

    fn enqueue(
        &mut self,
        correlation_id: u64,
        is_leave: bool,
        work: impl Future<Output = Result<(), v1::Error>> + Send + 'static,
    ) {
        self.work.queue.push_back(Box::pin(async move {
            let error = work.await.err();
            Outcome {
                done: v1::Done {
                    correlation_id,
                    error,
                },
                is_leave,
            }
        }));
    }
}

async fn go(seat: Seat, leave: v1::Leave) -> Result<(), v1::Error> {
    check::releases(&leave.claims)?;
    if leave.keep_place {
        seat.keep_place(leave.claims).await
    } else {
        seat.leave(leave.claims).await
    }
}

/// An update that a message can hold: offsets go without their metadata if there is too much of it.
fn fitted(mut update: v1::GroupUpdate) -> v1::GroupUpdate {
    if update.encoded_len() > ANSWER_BYTES_MAX {
        let committed = update
            .claims
            .iter_mut()
            .filter_map(|it| it.committed.as_mut());
        for offset in committed {
            offset.metadata.clear();
        }
    }
    update
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use parking_lot::Mutex;

    use super::*;

    async fn refused(
        mut requests: impl Stream<Item = Result<v1::SessionRequest, Status>> + Unpin,
    ) -> ErrorCode {
        match first_join(&mut requests).await {
            Err(NoMember::Refused(refused)) => refused.code(),
            _ => panic!("it has joined, or gone"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn join_that_is_late_may_come_again_and_another_message_in_its_place_may_not() {
        assert_eq!(refused(stream::pending()).await, ErrorCode::NotReady);
        let heartbeat = v1::SessionRequest {
            request: Some(Request::Heartbeat(v1::Heartbeat { sequence: 1 })),
        };
        let first = stream::iter([Ok(heartbeat)]);
        assert_eq!(refused(first).await, ErrorCode::InvalidArgument);
    }

    fn work(done: &Arc<Mutex<Vec<u64>>>, correlation_ids: std::ops::Range<u64>) -> Work {
        let mut work = Work::default();
        for correlation_id in correlation_ids {
            let done = Arc::clone(done);
            work.queue.push_back(Box::pin(async move {
                // It is under way for a while.
                tokio::task::yield_now().await;
                done.lock().push(correlation_id);
                Outcome {
                    done: v1::Done {
                        correlation_id,
                        error: None,
                    },
                    is_leave: false,
                }
            }));
        }
        work
    }

    #[tokio::test]
    async fn s27_client_that_is_gone_has_all_carried_out_that_it_asked_for() {
        let done = Arc::default();
        let mut work = work(&done, 0..3);
        work.progress().await;
        assert_eq!(work.outcomes.len(), 1);
        work.hear_no_more();
        while !work.is_idle() {
            work.progress().await;
        }
        assert_eq!(*done.lock(), [0, 1, 2]);
        assert!(work.outcomes.is_empty());
    }

    #[tokio::test]
    async fn progress_that_is_dropped_goes_on_with_the_next() {
        let done = Arc::default();
        let mut work = work(&done, 0..2);
        tokio::select! {
            biased;
            () = work.progress() => panic!("it is under way for a while"),
            () = std::future::ready(()) => {}
        }
        work.progress().await;
        work.progress().await;
        assert_eq!(*done.lock(), [0, 1]);
    }
}
