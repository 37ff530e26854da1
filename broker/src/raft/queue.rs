//! Frames waiting for a peer stream.
//!
//! What is queued while a message is on its way travels together in the next one, up to about a
//! megabyte. Heartbeats and their answers are *lazy*: when many groups produce them, they wait a
//! few milliseconds for each other, so that 1,000 groups do not make 1,000 messages. A lone
//! heartbeat (a ReadIndex round on a quiet broker) does not wait.
//!
//! Any task pushes; one stream task takes. The queue counts bytes but does not bound them: whoever
//! pushes has reserved them first ([`super::lane`]), or answers a request that was bounded.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message;
use qute_proto::internal::{PeerFrame, PeerMessage};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A message is closed once it holds this many bytes. One frame may be larger.
pub(super) const MESSAGE_BYTES: usize = 1 << 20;

/// Frames of one message, at most.
const MESSAGE_FRAMES_MAX: usize = 4096;

/// Lazy frames leave at most this often.
const LAZY_INTERVAL: Duration = Duration::from_millis(5);

/// How soon a frame must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// With the next message.
    Now,
    /// Within [`LAZY_INTERVAL`].
    Lazy,
}

#[derive(Default)]
struct State {
    // Each with its encoded size.
    frames: VecDeque<(usize, PeerFrame)>,
    bytes: usize,
    urgent: bool,
    closed: bool,
}

/// Frames for one stream, in order.
pub(super) struct FrameQueue {
    // Short: push, pop, count. Never held across an await.
    state: Mutex<State>,
    changed: Notify,
}

impl FrameQueue {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Queues a frame; `false` if the stream is gone.
    pub(super) fn push(&self, frame: PeerFrame, urgency: Urgency) -> bool {
        let size = frame.encoded_len();
        {
            let mut state = self.state.lock();
            if state.closed {
                return false;
            }
            state.frames.push_back((size, frame));
            state.bytes += size;
            state.urgent |= urgency == Urgency::Now;
        }
        self.changed.notify_one();
        true
    }

    /// Takes back the frame of this correlation id, if it still waits.
    pub(super) fn withdraw(&self, correlation_id: u64) {
        let mut state = self.state.lock();
        let found = state
            .frames
            .iter()
            .position(|(_, frame)| frame.correlation_id == correlation_id);
        if let Some((size, _)) = found.and_then(|at| state.frames.remove(at)) {
            state.bytes -= size;
            state.urgent &= !state.frames.is_empty();
        }
    }

    /// Bytes that wait.
    pub(super) fn bytes(&self) -> usize {
        self.state.lock().bytes
    }

    /// Ends the stream once what is queued has been taken.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_one();
    }

    /// The next message; `None` after [`close`](Self::close). `last_sent` is when the previous one
    /// was taken.
    ///
    /// # Cancel safety
    /// Safe: frames are taken at the end.
    pub(super) async fn next(&self, last_sent: &mut Instant) -> Option<PeerMessage> {
        loop {
            // Registered before the look, so that no push in between is missed.
            let changed = self.changed.notified();
            match self.look(*last_sent) {
                Look::Take => break,
                Look::Closed => return None,
                Look::Empty => changed.await,
                Look::Until(when) => {
                    let _ = tokio::time::timeout_at(when, changed).await;
                }
            }
        }
        *last_sent = Instant::now();
        Some(self.take())
    }

    fn look(&self, last_sent: Instant) -> Look {
        let state = self.state.lock();
        if state.frames.is_empty() {
            return if state.closed {
                Look::Closed
            } else {
                Look::Empty
            };
        }
        let lazy_at = last_sent + LAZY_INTERVAL;
        if state.urgent || state.closed || state.bytes >= MESSAGE_BYTES || lazy_at <= Instant::now()
        {
            Look::Take
        } else {
            Look::Until(lazy_at)
        }
    }

    fn take(&self) -> PeerMessage {
        let mut state = self.state.lock();
        let mut message = PeerMessage::default();
        let mut bytes = 0;
        while bytes < MESSAGE_BYTES && message.frames.len() < MESSAGE_FRAMES_MAX {
            let Some((size, frame)) = state.frames.pop_front() else {
                break;
            };
            bytes += size;
            message.frames.push(frame);
        }
        state.bytes -= bytes;
        // What is left did not fit: it must not wait for a lazy deadline.
        state.urgent = !state.frames.is_empty();
        message
    }
}

enum Look {
    Take,
    Closed,
    Empty,
    Until(Instant),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: usize) -> PeerFrame {
        PeerFrame {
            payload: vec![0; payload].into(),
            ..Default::default()
        }
    }

    fn long_ago() -> Instant {
        Instant::now()
            .checked_sub(Duration::from_secs(60))
            .unwrap_or_else(Instant::now)
    }

    #[tokio::test]
    async fn queue_with_many_frames_packs_them_into_one_message() {
        let queue = FrameQueue::new();
        for _ in 0..100 {
            queue.push(frame(10), Urgency::Now);
        }
        let message = queue.next(&mut long_ago()).await.unwrap();
        assert_eq!(message.frames.len(), 100);
    }

    #[tokio::test]
    async fn queue_with_megabytes_splits_them_into_messages() {
        let queue = FrameQueue::new();
        for _ in 0..4 {
            queue.push(frame(700 << 10), Urgency::Now);
        }
        let mut last = long_ago();
        assert_eq!(queue.next(&mut last).await.unwrap().frames.len(), 2);
        assert_eq!(queue.next(&mut last).await.unwrap().frames.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn queue_with_lazy_frames_waits_for_more_unless_it_was_quiet() {
        let queue = FrameQueue::new();
        let mut last = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        let before = Instant::now();
        queue.push(frame(1), Urgency::Lazy);
        queue.next(&mut last).await.unwrap();
        assert_eq!(Instant::now(), before, "quiet: at once");
        queue.push(frame(1), Urgency::Lazy);
        queue.push(frame(1), Urgency::Lazy);
        assert_eq!(queue.next(&mut last).await.unwrap().frames.len(), 2);
        assert_eq!(Instant::now(), before + LAZY_INTERVAL, "busy: together");
    }

    #[tokio::test]
    async fn queue_with_a_frame_taken_back_sends_the_others_in_order() {
        let queue = FrameQueue::new();
        for id in 1..=3 {
            let numbered = PeerFrame {
                correlation_id: id,
                ..frame(10)
            };
            queue.push(numbered, Urgency::Now);
        }
        queue.withdraw(2);
        queue.withdraw(9);
        let message = queue.next(&mut long_ago()).await.unwrap();
        let ids = message.frames.iter().map(|frame| frame.correlation_id);
        assert_eq!(ids.collect::<Vec<_>>(), [1, 3]);
        assert_eq!(queue.bytes(), 0);
        queue.withdraw(1);
    }

    #[tokio::test]
    async fn queue_that_is_closed_gives_what_it_holds_and_then_ends() {
        let queue = FrameQueue::new();
        queue.push(frame(1), Urgency::Lazy);
        queue.close();
        assert!(!queue.push(frame(1), Urgency::Now));
        let mut last = Instant::now();
        assert!(queue.next(&mut last).await.is_some());
        assert!(queue.next(&mut last).await.is_none());
    }
}
