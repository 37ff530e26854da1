//! The way to the coordinator, and the stream to it.
//!
//! ```text
//!  [apart] --find--> [finding] --found--> [opening] --opened--> [open]
//!     ^                  |                    |                    |
//!     '------------------'--------------------'--- broken, left ---'
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use qute_proto::v1;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::coordinator::{Coordinator, CoordinatorRoute, Wanted};
use super::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Connection, Lane, call_error, groups_client};

/// Limit of one search, after which it begins anew.
const FIND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a coordinator may take to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Requests that wait for the network. There are never many: a stream that takes none is broken.
const REQUESTS_MAX: usize = 256;

pub(super) struct Line {
    core: Arc<Core>,
    /// `None` while it is being followed by [`Stage::Finding`].
    route: Option<CoordinatorRoute>,
    stage: Stage,
}

enum Stage {
    Apart,
    Finding(BoxFuture<'static, (CoordinatorRoute, Result<Coordinator>)>),
    Opening(BoxFuture<'static, Result<Opened>>),
    Open(Box<Opened>),
}

struct Opened {
    number: u64,
    address: Address,
    connection: Connection,
    requests: mpsc::Sender<v1::SessionRequest>,
    responses: Streaming<v1::SessionResponse>,
}

/// What happens next on the line.
pub(super) enum Turn {
    /// The coordinator can't be found, for good.
    Lost(Error),
    Response(u64, v1::SessionResponse),
    /// The stream broke, or was not to be opened, or leads to a coordinator that was deposed.
    Broken(Error),
}

impl Line {
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let wanted = Wanted::Group(Arc::clone(&core.group));
        Self {
            core: Arc::clone(core),
            route: Some(CoordinatorRoute::new(Arc::clone(&core.shared), wanted)),
            stage: Stage::Apart,
        }
    }

    pub(super) fn is_apart(&self) -> bool {
        matches!(self.stage, Stage::Apart)
    }

    /// Looks for the coordinator, and opens a stream to it.
    pub(super) fn find(&mut self) {
        let Some(mut route) = self.route.take() else {
            return;
        };
        self.stage = Stage::Finding(Box::pin(async move {
            let found = route.next(Instant::now() + FIND_TIMEOUT).await;
            (route, found)
        }));
    }

    /// Leaves the stream, or the attempt at one.
    pub(super) fn leave(&mut self) {
        if !matches!(self.stage, Stage::Finding(_)) {
            self.stage = Stage::Apart;
        }
    }

    /// The coordinator serves.
    pub(super) fn succeeded(&mut self) {
        if let Some(route) = &mut self.route {
            route.succeeded();
        }
    }

    /// It has answered that it does not.
    pub(super) fn refused(&mut self, error: &v1::Error) {
        if let Some(route) = &mut self.route {
            route.refused(error);
        }
    }

    /// It does not do what a coordinator should.
    pub(super) fn failed(&mut self, error: Error) {
        if let Some(route) = &mut self.route {
            route.failed(error);
        }
    }

    /// False if the stream takes nothing any more.
    pub(super) fn send(&self, request: v1::session_request::Request) -> bool {
        let Stage::Open(opened) = &self.stage else {
            return false;
        };
        let request = v1::SessionRequest {
            request: Some(request),
        };
        opened.requests.try_send(request).is_ok()
    }

    /// What happens next; nothing ever does while it is apart.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn turn(&mut self) -> Turn {
        loop {
            let turn = match &mut self.stage {
                Stage::Apart => std::future::pending().await,
                Stage::Finding(finding) => {
                    let (route, found) = finding.await;
                    self.route = Some(route);
                    self.stage = Stage::Apart;
                    match found {
                        Ok(coordinator) => {
                            let opening = open(Arc::clone(&self.core), coordinator.address);
                            self.stage = Stage::Opening(Box::pin(opening));
                            continue;
                        }
                        Err(error) if is_final(&error) => return Turn::Lost(error),
                        // The search goes on.
                        Err(error) => return Turn::Broken(error),
                    }
                }
                Stage::Opening(opening) => {
                    let opened = opening.await;
                    self.stage = Stage::Apart;
                    match opened {
                        Ok(opened) => {
                            self.stage = Stage::Open(Box::new(opened));
                            continue;
                        }
                        Err(error) => {
                            self.failed(error.clone());
                            match is_final(&error) {
                                true => Turn::Lost(error),
                                false => Turn::Broken(error),
                            }
                        }
                    }
                }
                Stage::Open(opened) => {
                    let deposed = async {
                        match &mut self.route {
                            Some(route) => route.deposed().await,
                            None => std::future::pending().await,
                        }
                    };
                    let response = tokio::select! {
                        response = opened.responses.message() => response,
                        () = deposed => {
                            self.stage = Stage::Apart;
                            let error = Error::new(ErrorKind::NoLeader, "there is a newer coordinator");
                            return Turn::Broken(error);
                        }
                    };
                    let connections = &self.core.shared.connections;
                    let error = match response {
                        Ok(Some(response)) => {
                            connections.answered(&opened.address);
                            return Turn::Response(opened.number, response);
                        }
                        Ok(None) => {
                            Error::new(ErrorKind::NotReady, "the coordinator ended the stream")
                        }
                        Err(status) => broken(&self.core, opened, &status),
                    };
                    self.stage = Stage::Apart;
                    self.failed(error.clone());
                    Turn::Broken(error)
                }
            };
            return turn;
        }
    }
}

/// A connection that breaks may say that something is wrong inside, so that is not.
fn is_final(error: &Error) -> bool {
    !error.is_retriable() && error.kind() != ErrorKind::Internal
}

fn broken(core: &Core, opened: &Opened, status: &Status) -> Error {
    core.shared.connections.broken(&opened.connection, status);
    call_error(&opened.address, status)
}

async fn open(core: Arc<Core>, address: Address) -> Result<Opened> {
    let connections = &core.shared.connections;
    let connection = connections.ready(&address, Lane::Control).await?;
    let (requests, outbound) = mpsc::channel(REQUESTS_MAX);
    let (number, join) = core.with(|state| state.membership.open(Instant::now()));
    // There is room.
    let _ = requests.try_send(join);
    let mut client = groups_client(connection.channel());
    let opening = client.session(ReceiverStream::new(outbound));
    let responses = match timeout(OPEN_TIMEOUT, opening).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => {
            connections.broken(&connection, &status);
            return Err(call_error(&address, &status));
        }
        Err(_) => {
            connections.discard(&connection);
            return Err(Error::new(
                ErrorKind::Timeout,
                "the coordinator did not accept the stream in time",
            ));
        }
    };
    Ok(Opened {
        number,
        address,
        connection,
        requests,
        responses,
    })
}
