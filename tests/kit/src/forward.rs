//! One call through the proxy: its messages one by one, past the script, bytes untouched.
//!
//! ```text
//!   client --- requests ---> [ pump: ledger, script ] ---> broker
//!          <-- replies ---- [ pump: ledger, script ] <---
//!                 ^ refusals                |
//!                 +-------------------------+
//! ```

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Request, Response};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::call::Call;
use crate::fault::{ReplyFate, RequestFate};
use crate::frames::{Message, Parser};
use crate::ledger::{Asked, Ledger};
use crate::proxy::Core;

/// Messages between the two ends of a pump; more than that waits, as on a slow network.
const QUEUE: usize = 64;

pub(crate) type Body = UnsyncBoxBody<Bytes, Broken>;
/// A frame, and when it may go on.
type Queued = (Instant, Result<Frame<Bytes>, Broken>);

/// The stream is cut; HTTP/2 makes a reset of it.
#[derive(Debug, thiserror::Error)]
#[error("cut by the proxy")]
pub(crate) struct Broken;

/// Forwards one call.
///
/// # Errors
/// The call is to be cut.
pub(crate) async fn forward(
    core: Arc<Core>,
    mut upstream: SendRequest<Body>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Broken> {
    let call = Call::of_path(request.uri().path());
    let cut = core.cuts.token(call);
    let one = Exchange {
        call,
        ledger: Arc::new(Ledger::new(call, core.meters())),
        core,
        cut: cut.clone(),
    };
    let answered = async {
        upstream.ready().await.map_err(|_| Broken)?;
        if call.is_two_way() {
            one.two_way(upstream, request).await
        } else {
            one.one_way(upstream, request).await
        }
    };
    let answered = cut.run_until_cancelled(answered).await;
    answered.unwrap_or(Err(Broken))
}

/// One call under way.
#[derive(Clone)]
struct Exchange {
    call: Call,
    core: Arc<Core>,
    ledger: Arc<Ledger>,
    cut: CancellationToken,
}

impl Exchange {
    /// One request; one reply or more.
    async fn one_way(
        self,
        mut upstream: SendRequest<Body>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Broken> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map_err(|_| Broken)?.to_bytes();
        let mut parser = Parser::default();
        parser.push(&body);
        if let Some(message) = parser.next().map_err(|_| Broken)?
            && let Asked::Item(place) = self.ledger.ask(&message)
        {
            match self.core.script.request(self.call, place.as_ref()) {
                RequestFate::Pass => {}
                RequestFate::Cut => return Err(Broken),
                RequestFate::Refuse(error) => {
                    return Ok(refused(self.ledger.refusal(&message, *error)));
                }
            }
        }
        let whole = Full::new(body).map_err(|never| match never {});
        let request = towards_broker(parts, whole.boxed_unsync());
        let response = upstream.send_request(request).await.map_err(|_| Broken)?;
        let (_, no_refusals) = mpsc::channel(1);
        Ok(self.replies(response, no_refusals))
    }

    /// Messages both ways for as long as both like.
    async fn two_way(
        self,
        mut upstream: SendRequest<Body>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Broken> {
        let (parts, incoming) = request.into_parts();
        let (onward, to_broker) = mpsc::channel(QUEUE);
        let (refuse, refusals) = mpsc::channel(QUEUE);
        tokio::spawn(self.clone().pump_requests(incoming, onward, refuse));
        let request = towards_broker(parts, queued_body(to_broker));
        let response = upstream.send_request(request).await.map_err(|_| Broken)?;
        Ok(self.replies(response, refusals))
    }

    async fn pump_requests(
        self,
        incoming: Incoming,
        onward: mpsc::Sender<Queued>,
        refuse: mpsc::Sender<Message>,
    ) {
        let mut incoming = pin!(incoming);
        let mut parser = Parser::default();
        loop {
            let frame = tokio::select! {
                () = self.cut.cancelled() => None,
                () = onward.closed() => None,
                frame = incoming.frame() => Some(frame),
            };
            let frame = match frame {
                Some(Some(Ok(frame))) => frame,
                // The client has nothing more to say.
                Some(None) => return,
                Some(Some(Err(_))) | None => {
                    let _ = onward.send((Instant::now(), Err(Broken))).await;
                    return;
                }
            };
            let Ok(data) = frame.into_data() else {
                continue;
            };
            parser.push(&data);
            while let Ok(Some(message)) = parser.next() {
                if !self.request(message, &onward, &refuse).await {
                    return;
                }
            }
        }
    }

    /// Gives one request its fate; false: nothing more is to come through.
    async fn request(
        &self,
        message: Message,
        onward: &mpsc::Sender<Queued>,
        refuse: &mpsc::Sender<Message>,
    ) -> bool {
        let fate = match self.ledger.ask(&message) {
            Asked::Item(place) => self.core.script.request(self.call, place.as_ref()),
            Asked::Steering => RequestFate::Pass,
        };
        match fate {
            RequestFate::Pass => {
                let frame = Frame::data(message.encode());
                onward.send((Instant::now(), Ok(frame))).await.is_ok()
            }
            RequestFate::Cut => {
                self.cut.cancel();
                false
            }
            RequestFate::Refuse(error) => match self.ledger.refusal(&message, *error) {
                Some(reply) => refuse.send(reply).await.is_ok(),
                None => {
                    self.cut.cancel();
                    false
                }
            },
        }
    }

    fn replies(
        self,
        response: Response<Incoming>,
        refusals: mpsc::Receiver<Message>,
    ) -> Response<Body> {
        let (parts, incoming) = response.into_parts();
        let (queue, queued) = mpsc::channel(QUEUE);
        let replies = Replies {
            exchange: self,
            queue,
            last_due: Instant::now(),
        };
        tokio::spawn(replies.pump(incoming, refusals));
        Response::from_parts(parts, queued_body(queued))
    }
}

/// The way back.
struct Replies {
    exchange: Exchange,
    queue: mpsc::Sender<Queued>,
    /// Of what has gone before: replies keep their order.
    last_due: Instant,
}

impl Replies {
    async fn pump(mut self, incoming: Incoming, mut refusals: mpsc::Receiver<Message>) {
        let mut incoming = pin!(incoming);
        let mut parser = Parser::default();
        let cut = self.exchange.cut.clone();
        loop {
            tokio::select! {
                () = cut.cancelled() => {
                    self.send(Err(Broken), Duration::ZERO).await;
                    return;
                }
                // The client has gone.
                () = self.queue.closed() => return,
                Some(refusal) = refusals.recv() => {
                    self.send(Ok(Frame::data(refusal.encode())), Duration::ZERO).await;
                }
                frame = incoming.frame() => match frame {
                    None => return,
                    Some(Err(_)) => cut.cancel(),
                    Some(Ok(frame)) => self.frame(frame, &mut parser).await,
                },
            }
        }
    }

    async fn frame(&mut self, frame: Frame<Bytes>, parser: &mut Parser) {
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return self.send(Ok(trailers), Duration::ZERO).await,
        };
        parser.push(&data);
        while let Ok(Some(message)) = parser.next() {
            let exchange = &self.exchange;
            let place = exchange.ledger.told(&message);
            let script = &exchange.core.script;
            match script.reply(exchange.call, place.as_ref(), message) {
                ReplyFate::Pass(message, delay) => {
                    self.send(Ok(Frame::data(message.encode())), delay).await;
                }
                ReplyFate::Cut => exchange.cut.cancel(),
                ReplyFate::Swallow if exchange.call.is_two_way() => {}
                ReplyFate::Swallow => {
                    // The trailers must not tell.
                    tokio::select! {
                        () = exchange.cut.cancelled() => {}
                        () = self.queue.closed() => {}
                    }
                }
            }
            if self.exchange.cut.is_cancelled() {
                return;
            }
        }
    }

    async fn send(&mut self, frame: Result<Frame<Bytes>, Broken>, delay: Duration) {
        let due = self.last_due.max(Instant::now() + delay);
        self.last_due = due;
        // A client that has gone is found out by the pump.
        let _ = self.queue.send((due, frame)).await;
    }
}

fn queued_body(queued: mpsc::Receiver<Queued>) -> Body {
    let frames = ReceiverStream::new(queued).then(|(due, frame)| async move {
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
        }
        frame
    });
    StreamBody::new(frames).boxed_unsync()
}

fn towards_broker(parts: Parts, body: Body) -> Request<Body> {
    Request::from_parts(parts, body)
}

/// A whole answer made here.
fn refused(message: Option<Message>) -> Response<Body> {
    const OK: HeaderValue = HeaderValue::from_static("0");
    const UNAVAILABLE: HeaderValue = HeaderValue::from_static("14");
    let status = |code| {
        let mut status = HeaderMap::new();
        status.insert("grpc-status", code);
        status
    };
    let (frames, head) = match message {
        Some(message) => (
            vec![
                Ok(Frame::data(message.encode())),
                Ok(Frame::trailers(status(OK))),
            ],
            HeaderMap::new(),
        ),
        None => (Vec::new(), status(UNAVAILABLE)),
    };
    let mut response = Response::new(StreamBody::new(futures::stream::iter(frames)).boxed_unsync());
    *response.headers_mut() = head;
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    response
}
