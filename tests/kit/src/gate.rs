//! The connections of a proxy as such: whether bytes flow, and how a connection ends.
//!
//! ```text
//!            pause            resume
//!   Flowing -------> Paused ---------> Flowing     bytes wait, none is lost
//!   any ---- black hole ----> Lost                  nothing is said ever again, no RST
//!   any ---- reset ---------> Reset                 RST
//! ```

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// What the bytes of a connection do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Flow {
    Flowing = 0,
    Paused = 1,
    Lost = 2,
    Reset = 3,
}

impl Flow {
    fn of(number: u8) -> Self {
        match number {
            0 => Self::Flowing,
            1 => Self::Paused,
            2 => Self::Lost,
            _ => Self::Reset,
        }
    }
}

/// The switch of one connection.
#[derive(Debug)]
pub(crate) struct Switch {
    flow: AtomicU8,
    reader: AtomicWaker,
    writer: AtomicWaker,
    reset: Notify,
}

impl Switch {
    fn new(flow: Flow) -> Self {
        Self {
            flow: AtomicU8::new(flow as u8),
            reader: AtomicWaker::new(),
            writer: AtomicWaker::new(),
            reset: Notify::new(),
        }
    }

    fn flow(&self) -> Flow {
        Flow::of(self.flow.load(Ordering::Acquire))
    }

    /// A connection never comes back from the end that it has had.
    fn set(&self, flow: Flow) {
        let next = |now| match (Flow::of(now), flow) {
            (Flow::Reset, _) | (Flow::Lost, Flow::Flowing | Flow::Paused) => None,
            _ => Some(flow as u8),
        };
        let _ = self
            .flow
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        self.reader.wake();
        self.writer.wake();
        if flow == Flow::Reset {
            self.reset.notify_one();
        }
    }

    /// Resolves once the connection is to be reset.
    pub(crate) async fn is_reset(&self) {
        while self.flow() != Flow::Reset {
            self.reset.notified().await;
        }
    }
}

/// All connections of a proxy.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Of connections to come.
    flow: Flow,
    switches: Vec<Weak<Switch>>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            flow: Flow::Flowing,
            switches: Vec::new(),
        }
    }
}

impl Gate {
    pub(crate) fn admit(&self, stream: TcpStream) -> Gated {
        let mut inner = self.inner.lock();
        let switch = Arc::new(Switch::new(inner.flow));
        inner.switches.retain(|switch| switch.strong_count() > 0);
        inner.switches.push(Arc::downgrade(&switch));
        Gated { stream, switch }
    }

    /// Sets the flow of all connections, those to come included.
    pub(crate) fn set(&self, flow: Flow) {
        let mut inner = self.inner.lock();
        inner.flow = flow;
        inner.set_open(flow);
    }

    /// Resets the connections that are open.
    pub(crate) fn reset(&self) {
        self.inner.lock().set_open(Flow::Reset);
    }

    /// How many connections are open.
    pub(crate) fn open(&self) -> usize {
        let inner = self.inner.lock();
        let open = |switch: &&Weak<Switch>| switch.strong_count() > 0;
        inner.switches.iter().filter(open).count()
    }
}

impl Inner {
    fn set_open(&self, flow: Flow) {
        for switch in self.switches.iter().filter_map(Weak::upgrade) {
            switch.set(flow);
        }
    }
}

/// A connection whose bytes flow as its switch says.
#[derive(Debug)]
pub(crate) struct Gated {
    stream: TcpStream,
    switch: Arc<Switch>,
}

impl Gated {
    pub(crate) fn switch(&self) -> Arc<Switch> {
        Arc::clone(&self.switch)
    }

    /// Has the connection end with RST when it is dropped.
    pub(crate) fn end_by_reset(&self) {
        // Without it the other side sees an orderly end, which is the worst that can come of it.
        let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }

    /// Whether bytes may flow; `waker` is woken when that changes.
    fn pass(&self, waker: &AtomicWaker, cx: &Context<'_>) -> Poll<io::Result<()>> {
        // Registered before the look, so that a change in between is not missed.
        waker.register(cx.waker());
        match self.switch.flow() {
            Flow::Flowing => Poll::Ready(Ok(())),
            Flow::Paused | Flow::Lost => Poll::Pending,
            Flow::Reset => {
                self.end_by_reset();
                Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
            }
        }
    }
}

impl AsyncRead for Gated {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        std::task::ready!(self.pass(&self.switch.reader, cx))?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Gated {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        std::task::ready!(self.pass(&self.switch.writer, cx))?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        std::task::ready!(self.pass(&self.switch.writer, cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        std::task::ready!(self.pass(&self.switch.writer, cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
