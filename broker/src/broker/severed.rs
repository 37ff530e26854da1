//! Connections that can be cut off at once, whatever is still under way on them.
//!
//! tonic ends a connection only in order: it tells the client, and waits for its streams. A broker
//! that is to stop like a crash ([`super::Broker::abort`]) takes the socket away instead.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A connection that fails once its token is cancelled.
pub(super) struct Severable {
    socket: TcpStream,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// Makes every accepted connection end with `severed`.
pub(super) fn severable(
    accepted: impl Stream<Item = io::Result<TcpStream>>,
    severed: CancellationToken,
) -> impl Stream<Item = io::Result<Severable>> {
    accepted.map(move |socket| {
        Ok(Severable {
            socket: socket?,
            severed: Box::pin(severed.clone().cancelled_owned()),
        })
    })
}

impl Severable {
    /// Ready once it is cut off; the task is woken then, too.
    fn poll_severed(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        ready!(self.severed.as_mut().poll(cx));
        Poll::Ready(io::Error::from(io::ErrorKind::ConnectionAborted))
    }

    /// What the socket says, unless it has to wait and has been cut off.
    fn unless_severed<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => self.poll_severed(cx).map(Err),
        }
    }
}

impl AsyncRead for Severable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Asked first: a peer that goes on sending must not keep the connection alive.
        if let Poll::Ready(error) = self.poll_severed(cx) {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Severable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.unless_severed(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.unless_severed(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.socket).poll_flush(cx);
        self.unless_severed(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.socket).poll_shutdown(cx);
        self.unless_severed(cx, polled)
    }
}

impl Connected for Severable {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.socket.connect_info()
    }
}
