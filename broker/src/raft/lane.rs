//! One outgoing stream to one peer: a multiplexed, pipelined lane.
//!
//! There are two lanes to each peer, each a connection of its own, so that a megabyte of batches
//! never delays a heartbeat: *control* (votes, heartbeats, hints) and *data* (appends, snapshots).
//!
//! ```text
//!            address known              hello answered
//!   Down ----------------> Connecting -----------------> Up
//!     ^                         |   refused, timeout      |  broken, superseded (S23)
//!     +--- jittered back-off ---+-------------------------+
//! ```
//!
//! One task per lane owns the connection; [`Link`] is what everybody else holds. When a connection
//! ends, every request in flight on it fails at once: nothing is sent twice.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use prost::Message;
use qute_proto::ids::BrokerId;
use qute_proto::internal::peer_client::PeerClient;
use qute_proto::internal::{PeerFrame, PeerHello, PeerMessage};
use rand::RngExt;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::identity::{Admitted, Refusal};
use super::peers::Context;
use super::queue::{FrameQueue, Urgency};

/// Bytes of one message between brokers, at most: one frame can carry a large snapshot.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Bytes of one snapshot, at most: it travels in one frame. A state machine whose state may grow
/// keeps it below.
pub const SNAPSHOT_BYTES_MAX: usize = MESSAGE_BYTES_MAX - (1 << 20);

/// HTTP/2 settings between brokers; the server side must use them too.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// See [`STREAM_WINDOW_BYTES`].
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// See [`STREAM_WINDOW_BYTES`].
pub const HTTP2_FRAME_BYTES: u32 = 256 << 10;

/// Bytes queued or unanswered on one lane, at most.
const IN_FLIGHT_BYTES_MAX: usize = 64 << 20;

const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
const HELLO_DEADLINE: Duration = Duration::from_secs(2);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEP_ALIVE_DEADLINE: Duration = Duration::from_secs(2);
const BACK_OFF_MIN: Duration = Duration::from_millis(50);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);

/// Which of the two streams to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lane {
    /// Votes, heartbeats, hints.
    Control,
    /// Appends and snapshots.
    Data,
}

/// A request that got no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LinkError {
    /// There is no connection, or it broke before the answer came.
    #[error("broker {0} is not connected")]
    Down(BrokerId),
    /// No answer in time.
    #[error("no answer in time")]
    Timeout,
    /// The peer did not handle the request: it has no such replica, say.
    #[error("refused by the peer: {0}")]
    Remote(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connecting,
    Up,
    Down,
}

#[derive(Default)]
struct Pending {
    next_id: u64,
    answers: HashMap<u64, Waiting>,
    // The queue of the connection that is up.
    queue: Option<Arc<FrameQueue>>,
}

/// A request without its answer. Its bytes count as in flight until the answer arrives, whether or
/// not somebody looks at it then: a caller that waits for room must not wait for itself. They end
/// with the [`Ticket`] too, which takes the frame back if it still waits to be sent.
struct Waiting {
    answer: oneshot::Sender<PeerFrame>,
    _in_flight: OwnedSemaphorePermit,
}

/// What the users of a lane share with its task.
pub(super) struct Link {
    peer: BrokerId,
    lane: Lane,
    // Short: one map operation, or a push. Never held across an await.
    pending: Mutex<Pending>,
    state: watch::Sender<State>,
    in_flight: Arc<Semaphore>,
    kick: Notify,
}

/// An answer to come. Dropping it forgets the request, and takes it back if it is not sent yet: on
/// a slow connection a request made again must not wait behind those that were given up.
pub(super) struct Ticket {
    link: Arc<Link>,
    id: u64,
    answer: oneshot::Receiver<PeerFrame>,
}

impl Link {
    pub(super) fn new(peer: BrokerId, lane: Lane) -> Arc<Self> {
        Arc::new(Self {
            peer,
            lane,
            pending: Mutex::default(),
            state: watch::Sender::new(State::Connecting),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_BYTES_MAX)),
            kick: Notify::new(),
        })
    }

    /// Connect now rather than at the end of the back-off: the peer showed itself.
    pub(super) fn kick(&self) {
        self.kick.notify_one();
    }

    pub(super) fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    /// Sends a request; requests of one caller leave in the order of its calls.
    ///
    /// Waits for the first connection attempt, and for room among the bytes in flight, but never
    /// beyond `deadline`.
    pub(super) async fn send(
        self: &Arc<Self>,
        frame: PeerFrame,
        urgency: Urgency,
        deadline: Instant,
    ) -> Result<Ticket, LinkError> {
        let sent = async {
            let mut state = self.state.subscribe();
            let settled = state.wait_for(|state| *state != State::Connecting).await;
            if !settled.is_ok_and(|state| *state == State::Up) {
                return Err(LinkError::Down(self.peer));
            }
            // Clamped: a snapshot may be larger than the budget, and then goes alone.
            let bytes = frame.encoded_len().clamp(1, IN_FLIGHT_BYTES_MAX);
            let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
            let permit = Arc::clone(&self.in_flight)
                .acquire_many_owned(permits)
                .await
                .map_err(|_| LinkError::Down(self.peer))?;
            self.submit(frame, urgency, permit)
        };
        match tokio::time::timeout_at(deadline, sent).await {
            Ok(result) => result,
            Err(_elapsed) => Err(LinkError::Timeout),
        }
    }

    fn submit(
        self: &Arc<Self>,
        mut frame: PeerFrame,
        urgency: Urgency,
        permit: OwnedSemaphorePermit,
    ) -> Result<Ticket, LinkError> {
        let (sender, answer) = oneshot::channel();
        let mut pending = self.pending.lock();
        pending.next_id += 1;
        let id = pending.next_id;
        frame.correlation_id = id;
        // Under the lock, so that ids and frames are in the same order.
        let queued = pending
            .queue
            .as_ref()
            .is_some_and(|queue| queue.push(frame, urgency));
        if !queued {
            return Err(LinkError::Down(self.peer));
        }
        let waiting = Waiting {
            answer: sender,
            _in_flight: permit,
        };
        pending.answers.insert(id, waiting);
        drop(pending);
        Ok(Ticket {
            link: Arc::clone(self),
            id,
            answer,
        })
    }

    /// Sends a frame that has no answer, if the lane is up.
    pub(super) fn tell(&self, frame: PeerFrame) -> bool {
        let pending = self.pending.lock();
        pending
            .queue
            .as_ref()
            .is_some_and(|queue| queue.push(frame, Urgency::Now))
    }

    fn answered(&self, frame: PeerFrame) {
        let waiting = self.pending.lock().answers.remove(&frame.correlation_id);
        if let Some(waiting) = waiting {
            // Nobody may be waiting any more.
            let _ = waiting.answer.send(frame);
        }
    }

    fn up(&self, queue: Arc<FrameQueue>) {
        self.pending.lock().queue = Some(queue);
        self.state.send_replace(State::Up);
    }

    fn down(&self) {
        self.state.send_replace(State::Down);
        let abandoned = {
            let mut pending = self.pending.lock();
            if let Some(queue) = pending.queue.take() {
                queue.close();
            }
            std::mem::take(&mut pending.answers)
        };
        // Outside the lock: dropping wakes those who wait.
        drop(abandoned);
    }
}

impl Ticket {
    /// Waits for the answer.
    ///
    /// # Cancel safety
    /// Safe: the wait can be taken up again.
    pub(super) async fn answer(&mut self, deadline: Instant) -> Result<PeerFrame, LinkError> {
        match tokio::time::timeout_at(deadline, &mut self.answer).await {
            Err(_elapsed) => Err(LinkError::Timeout),
            Ok(Err(_closed)) => Err(LinkError::Down(self.link.peer)),
            Ok(Ok(frame)) if frame.failure.is_empty() => Ok(frame),
            Ok(Ok(frame)) => Err(LinkError::Remote(frame.failure)),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut pending = self.link.pending.lock();
        let waiting = pending.answers.remove(&self.id);
        if waiting.is_some()
            && let Some(queue) = &pending.queue
        {
            queue.withdraw(self.id);
        }
        drop(pending);
        // Outside the lock, and after the frame has gone: this is what frees its bytes.
        drop(waiting);
    }
}

/// How a connection ended.
enum End {
    Shutdown,
    Refused(String),
    RefusedPeer(Refusal),
    Broken(String),
}

/// The task of one lane.
pub(super) async fn run(link: Arc<Link>, context: Arc<Context>) {
    let mut back_off = BACK_OFF_MIN;
    let mut told = false;
    loop {
        let mut addresses = context.addresses.subscribe();
        let mut cluster = context.cluster.subscribe();
        let started = Instant::now();
        let end = connect_and_serve(&link, &context).await;
        let was_up = link.is_up();
        link.down();
        if was_up {
            back_off = BACK_OFF_MIN;
            told = false;
        }
        match end {
            End::Shutdown => return,
            // Once per outage: a peer that is gone is not news every second.
            End::Broken(reason) if !told => {
                tracing::info!(peer = %link.peer, lane = ?link.lane, reason, "no connection to peer");
                told = true;
            }
            End::Broken(_) => {}
            End::Refused(reason) => {
                tracing::error!(peer = %link.peer, reason, "this broker is refused by a peer");
                back_off = BACK_OFF_MAX;
            }
            End::RefusedPeer(refusal) => {
                tracing::warn!(peer = %link.peer, %refusal, "a peer is refused");
                back_off = BACK_OFF_MAX;
            }
        }
        let jittered = back_off.mul_f64(rand::rng().random_range(0.5..1.5));
        back_off = (back_off * 2).min(BACK_OFF_MAX);
        let until = started + jittered;
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            () = link.kick.notified() => {}
            _ = addresses.changed() => {}
            _ = cluster.changed() => {}
            () = context.shutdown.cancelled() => return,
        }
    }
}

async fn connect_and_serve(link: &Arc<Link>, context: &Arc<Context>) -> End {
    let work = async {
        let Some(address) = context.address(link.peer) else {
            return End::Broken("its address is not known".to_owned());
        };
        let Some(hello) = context.hello() else {
            return End::Broken("this broker is in no cluster yet".to_owned());
        };
        match open(link, context, &address, hello).await {
            Ok((inbound, queue, peer)) => serve(link, context, inbound, queue, &peer).await,
            Err(end) => end,
        }
    };
    tokio::select! {
        end = work => end,
        () = context.shutdown.cancelled() => End::Shutdown,
    }
}

type Opened = (tonic::Streaming<PeerMessage>, Arc<FrameQueue>, Admitted);

async fn open(
    link: &Link,
    context: &Context,
    address: &str,
    hello: PeerHello,
) -> Result<Opened, End> {
    let broken = |reason: &dyn std::fmt::Display| End::Broken(format!("{address}: {reason}"));
    let channel = connect(address).await.map_err(|error| broken(&error))?;
    let queue = Arc::new(FrameQueue::new());
    let mut client = PeerClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let outbound = outbound(hello, Arc::clone(&queue));
    let greeted = tokio::time::timeout(HELLO_DEADLINE, async {
        let mut inbound = client.stream(outbound).await?.into_inner();
        let first = inbound.message().await?;
        Ok::<_, tonic::Status>((inbound, first))
    });
    let (inbound, first) = greeted
        .await
        .map_err(|_| broken(&"no hello in time"))?
        .map_err(|status| broken(&status.message()))?;
    let first = first.ok_or_else(|| broken(&"the stream ended before the hello"))?;
    if let Some(refused) = first.refused {
        return Err(if context.is_final(&refused) {
            context.report_refused(&refused.message);
            End::Refused(refused.message)
        } else {
            broken(&refused.message)
        });
    }
    let hello = first.hello.ok_or_else(|| broken(&"no hello"))?;
    if hello.broker_id != link.peer.0 {
        return Err(broken(&format_args!(
            "broker {} answers there",
            hello.broker_id
        )));
    }
    let peer = context.admit(&hello).map_err(End::RefusedPeer)?;
    Ok((inbound, queue, peer))
}

/// A connection to a broker, with the settings that brokers use among themselves.
///
/// # Errors
/// The address is malformed, or nobody answers there in time.
pub async fn connect(address: &str) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .http2_adaptive_window(false)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_DEADLINE)
        .keep_alive_while_idle(true)
        .connect()
        .await
}

/// The hello, then what is queued. A stream with nothing to say says so each second, so that the
/// peer knows that this process is alive (S23).
fn outbound(
    hello: PeerHello,
    queue: Arc<FrameQueue>,
) -> impl Stream<Item = PeerMessage> + Send + 'static {
    let first = PeerMessage {
        hello: Some(hello),
        ..Default::default()
    };
    let last_sent = Instant::now();
    futures::stream::unfold(
        (Some(first), queue, last_sent),
        |(first, queue, mut last_sent)| async move {
            if let Some(first) = first {
                return Some((first, (None, queue, last_sent)));
            }
            let next = queue.next(&mut last_sent);
            let message = match tokio::time::timeout(KEEP_ALIVE_INTERVAL, next).await {
                Ok(message) => message?,
                Err(_elapsed) => PeerMessage::default(),
            };
            Some((message, (None, queue, last_sent)))
        },
    )
}

async fn serve(
    link: &Link,
    context: &Context,
    mut inbound: tonic::Streaming<PeerMessage>,
    queue: Arc<FrameQueue>,
    peer: &Admitted,
) -> End {
    tracing::debug!(peer = %link.peer, lane = ?link.lane, "connected to peer");
    link.up(queue);
    let end = loop {
        let message = tokio::select! {
            message = inbound.message() => message,
            () = peer.superseded.cancelled() => {
                break End::Broken("another process has taken over its identity".to_owned());
            }
        };
        match message {
            Ok(Some(message)) => {
                context.known.heard(peer);
                for frame in message.frames {
                    link.answered(frame);
                }
            }
            Ok(None) => break End::Broken("the peer ended the stream".to_owned()),
            Err(status) => break End::Broken(status.message().to_owned()),
        }
    };
    context.known.lost(peer);
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn link_with_a_request_given_up_keeps_neither_its_frame_nor_its_bytes() {
        let link = Link::new(BrokerId(2), Lane::Data);
        let queue = Arc::new(FrameQueue::new());
        link.up(Arc::clone(&queue));
        let frame = PeerFrame {
            payload: vec![0; 1 << 20].into(),
            ..Default::default()
        };
        // The peer takes nothing, as on a connection that is stuck.
        for _ in 0..3 {
            let deadline = Instant::now() + Duration::from_secs(5);
            let sent = link.send(frame.clone(), Urgency::Now, deadline).await;
            let mut ticket = sent.unwrap();
            assert!(queue.bytes() > 1 << 20);
            assert_eq!(ticket.answer(deadline).await, Err(LinkError::Timeout));
            assert!(link.in_flight.available_permits() < IN_FLIGHT_BYTES_MAX);
            drop(ticket);
            assert_eq!(queue.bytes(), 0);
            assert_eq!(link.in_flight.available_permits(), IN_FLIGHT_BYTES_MAX);
        }
    }
}
