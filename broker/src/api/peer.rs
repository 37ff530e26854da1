//! `internal.v1.Peer`: what brokers ask each other.
//!
//! The Raft stream is handed to the raft layer. The unary calls work before the cluster is formed
//! too: that is what forming is made of.

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use prost::Message as _;
use qute_proto::ids::{BrokerId, ClusterId, TopicId};
use qute_proto::internal::peer_server::{Peer, PeerServer};
use qute_proto::internal::{
    AdmitBroker, BrokerAddress, ClusterCommand, FormState, FoundRequest, FoundResponse,
    JoinRequest, JoinResponse, PeerHello, PeerMessage, ProbeRequest, ProbeResponse, PromiseRequest,
    PromiseResponse, ProposeRequest, ProposeResponse, cluster_command::Command,
};
use qute_proto::v1::{self, ErrorCode};
use tonic::{Request, Response, Status, Streaming};

use crate::controller::Controller;
use crate::controller::forming::driver::copied;
use crate::controller::proposer::error;
use crate::raft::lane::MESSAGE_BYTES_MAX;

/// How long the controller may take to decide on what another broker hands in.
const DECIDE_DEADLINE: Duration = Duration::from_secs(5);
/// Names and addresses are not longer than this.
const TEXT_BYTES_MAX: usize = 512;
/// A founding set is not larger than this.
const FOUNDERS_MAX: usize = 128;

/// The peer service of one broker.
#[derive(Clone)]
pub struct PeerApi {
    controller: Controller,
}

impl PeerApi {
    /// Serves for this controller.
    #[must_use]
    pub fn new(controller: Controller) -> Self {
        Self { controller }
    }

    /// The tonic server, with its limits set.
    #[must_use]
    pub fn server(&self) -> PeerServer<Self> {
        PeerServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// The cluster that this broker belongs to.
    fn cluster(&self) -> Option<ClusterId> {
        self.controller
            .former()
            .formed()
            .borrow()
            .as_ref()
            .map(|formed| formed.cluster)
    }

    /// Whether a caller is acceptable: not a copy of this broker, of this cluster or of none, and
    /// the newest process of its identity (S23).
    fn check(&self, hello: &PeerHello, address: &str) -> Result<(), v1::Error> {
        let me = self.controller.me();
        if hello.broker_id == me.broker_id {
            if hello.process_id == me.process_id {
                return Ok(());
            }
            return Err(error(ErrorCode::InvalidArgument, copied(me, address)));
        }
        if hello.cluster_id.is_empty() || self.cluster().is_none() {
            // One of the two is of no cluster yet; it is checked when it joins.
            return Ok(());
        }
        match self.controller.peers().check_hello(hello) {
            Ok(_) => Ok(()),
            Err(refusal) => Err(refusal.to_wire()),
        }
    }

    /// Whether a caller that passed the check is believed where it is. S23: a member that has
    /// registered itself knows its cluster and says so; who names none and uses its id does not
    /// get its place.
    fn believes(&self, hello: &PeerHello) -> bool {
        let caller = BrokerId(hello.broker_id);
        !hello.cluster_id.is_empty() || !self.controller.view().is_registered(caller)
    }

    /// A member of this cluster, or an error.
    fn check_member(&self, hello: Option<&PeerHello>) -> Result<BrokerId, v1::Error> {
        let hello = hello.ok_or_else(|| error(ErrorCode::InvalidArgument, "no hello"))?;
        let peers = self.controller.peers();
        peers
            .check_hello(hello)
            .map_err(|refusal| refusal.to_wire())
    }

    async fn answer_join(&self, request: JoinRequest) -> Result<JoinResponse, v1::Error> {
        let broker = checked_address(request.broker)?;
        let hello = request.hello.unwrap_or_default();
        let consistent = hello.broker_id == broker.broker_id
            && hello.boot == broker.boot
            && hello.process_id == broker.process_id;
        if !consistent {
            return Err(error(
                ErrorCode::InvalidArgument,
                "hello and address differ",
            ));
        }
        self.check(&hello, &broker.peer_address)?;
        let proposer = self.controller.proposer();
        let command = ClusterCommand {
            command: Some(Command::AdmitBroker(AdmitBroker {
                broker: Some(broker.clone()),
            })),
        };
        let bytes = command.encode_to_vec().into();
        let decided = proposer.propose_here(bytes, DECIDE_DEADLINE).await?;
        if let Some(refusal) = decided.refusal() {
            return Err(refusal);
        }
        let cluster = self.cluster();
        let cluster =
            cluster.ok_or_else(|| error(ErrorCode::NotReady, "not part of a cluster yet"))?;
        tracing::info!(
            broker = broker.broker_id,
            address = broker.peer_address,
            "broker admitted"
        );
        Ok(JoinResponse {
            cluster_id: cluster.to_wire(),
            cluster_replica_id: decided.reply.replica_id,
            ..JoinResponse::default()
        })
    }

    async fn answer_propose(&self, request: ProposeRequest) -> Result<ProposeResponse, v1::Error> {
        let caller = self.check_member(request.hello.as_ref())?;
        let command = ClusterCommand::decode(request.command.clone())
            .map_err(|problem| error(ErrorCode::InvalidArgument, problem.to_string()))?;
        match &command.command {
            Some(Command::RegisterBroker(register)) => {
                let broker = checked_address(register.broker.clone())?;
                if broker.broker_id != caller.0 {
                    let text = "a broker registers itself only";
                    return Err(error(ErrorCode::InvalidArgument, text));
                }
            }
            Some(Command::PartitionsBorn(_) | Command::ReplicasDeleted(_)) => {}
            // The leader decides where it goes.
            Some(Command::CreateTopic(create)) if create.topic_id == TopicId::GROUPS.to_wire() => {
                return Ok(ProposeResponse {
                    cluster_index: self.controller.create_groups_topic().await?,
                    ..ProposeResponse::default()
                });
            }
            _ => {
                let text =
                    "members hand in registrations, reports and the wish for `__groups` only";
                return Err(error(ErrorCode::InvalidArgument, text));
            }
        }
        let proposer = self.controller.proposer();
        let decided = proposer
            .propose_here(request.command, DECIDE_DEADLINE)
            .await?;
        Ok(ProposeResponse {
            error: None,
            reply: decided.reply.encode_to_vec().into(),
            cluster_index: decided.index,
        })
    }

    /// Everybody that may help to find the leader.
    fn known(&self) -> Vec<BrokerAddress> {
        let mut known = self.controller.book().all();
        known.push(self.controller.me().clone());
        known
    }
}

/// An address of sane size.
fn checked_address(address: Option<BrokerAddress>) -> Result<BrokerAddress, v1::Error> {
    let address = address.ok_or_else(|| error(ErrorCode::InvalidArgument, "no address"))?;
    let texts = [
        &address.name,
        &address.client_address,
        &address.peer_address,
        &address.gossip_address,
        &address.rack,
    ];
    if texts.iter().any(|text| text.len() > TEXT_BYTES_MAX) {
        return Err(error(ErrorCode::InvalidArgument, "an address is too long"));
    }
    if address.broker_id == 0 || address.peer_address.is_empty() {
        return Err(error(
            ErrorCode::InvalidArgument,
            "an address is incomplete",
        ));
    }
    Ok(address)
}

#[tonic::async_trait]
impl Peer for PeerApi {
    type StreamStream = Pin<Box<dyn Stream<Item = Result<PeerMessage, Status>> + Send>>;

    async fn stream(
        &self,
        request: Request<Streaming<PeerMessage>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let answers = self.controller.groups().serve_stream(request.into_inner());
        Ok(Response::new(answers))
    }

    async fn probe(
        &self,
        request: Request<ProbeRequest>,
    ) -> Result<Response<ProbeResponse>, Status> {
        let request = request.into_inner();
        let hello = request.hello.unwrap_or_default();
        let me = self.controller.me().clone();
        let caller = checked_address(request.caller).ok();
        let from = caller
            .as_ref()
            .map_or("", |caller| caller.peer_address.as_str());
        let mut response = ProbeResponse {
            hello: Some(self.controller.peers().hello()),
            broker: Some(me),
            ..ProbeResponse::default()
        };
        if let Err(refusal) = self.check(&hello, from) {
            tracing::warn!(
                broker = hello.broker_id,
                address = from,
                reason = refusal.message,
                "a broker is refused"
            );
            response.error = Some(refusal);
        } else if let Some(caller) = &caller
            && caller.broker_id == hello.broker_id
            && self.believes(&hello)
        {
            self.controller.book().learn(caller);
        }
        let (state, promised, expect) = self.controller.former().facts().await;
        response.state = state.into();
        response.promised = promised;
        response.expect = expect;
        response.known = self.controller.book().all();
        response.controller = self.controller.controller();
        // Both from one moment: a state of FORMED comes with its cluster id.
        let cluster = self.cluster();
        if let (FormState::Formed, Some(cluster), Some(hello)) =
            (state, cluster, response.hello.as_mut())
        {
            hello.cluster_id = cluster.to_wire();
        }
        Ok(Response::new(response))
    }

    async fn promise(
        &self,
        request: Request<PromiseRequest>,
    ) -> Result<Response<PromiseResponse>, Status> {
        let set = request.into_inner().set.unwrap_or_default();
        let sane = set.brokers.len() <= FOUNDERS_MAX
            && set
                .brokers
                .iter()
                .all(|broker| checked_address(Some(broker.clone())).is_ok());
        if !sane {
            return Ok(Response::new(PromiseResponse {
                promised: false,
                reason: "the founding set makes no sense".to_owned(),
                conflict: true,
            }));
        }
        let outcome = self.controller.former().promise(&set).await;
        outcome
            .map(Response::new)
            .map_err(|problem| Status::internal(problem.to_string()))
    }

    async fn found(
        &self,
        request: Request<FoundRequest>,
    ) -> Result<Response<FoundResponse>, Status> {
        let set = request.into_inner().set.unwrap_or_default();
        let outcome = self.controller.former().found(&set).await;
        outcome
            .map(Response::new)
            .map_err(|problem| Status::internal(problem.to_string()))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let mut response = match self.answer_join(request.into_inner()).await {
            Ok(response) => response,
            Err(error) => JoinResponse {
                error: Some(error),
                ..JoinResponse::default()
            },
        };
        response.brokers = self.known();
        Ok(Response::new(response))
    }

    async fn propose(
        &self,
        request: Request<ProposeRequest>,
    ) -> Result<Response<ProposeResponse>, Status> {
        let outcome = self.answer_propose(request.into_inner()).await;
        Ok(Response::new(outcome.unwrap_or_else(|error| {
            ProposeResponse {
                error: Some(error),
                ..ProposeResponse::default()
            }
        })))
    }
}
