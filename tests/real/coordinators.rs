//! Coordinators of consumer groups as real processes, over raw gRPC: frozen, and spoken to in riddles.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::groups_client::GroupsClient;
use qute_proto::v1::session_request::Request;
use qute_proto::v1::session_response::Response;
use qute_proto::v1::{self, ErrorCode};
use qute_tests::cluster::Cluster;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use crate::bins;

const LIMIT: Duration = Duration::from_secs(30);
const GROUP: &str = "billing";

struct Member {
    requests: mpsc::Sender<v1::SessionRequest>,
    answers: Streaming<v1::SessionResponse>,
    generation: u64,
}

impl Member {
    async fn start(channel: Channel, session_timeout_ms: u32) -> Result<Self> {
        let (requests, outgoing) = mpsc::channel(64);
        let join = v1::Join {
            group: GROUP.to_owned(),
            member_id: MemberId::random().to_wire(),
            member_epoch: 1,
            assignors: vec![v1::AssignorVersion {
                name: "sticky".to_owned(),
                version: 1,
            }],
            topics: vec![v1::TopicSubscription {
                topic_id: TopicId::random().to_wire(),
                partitions: 1,
            }],
            session_timeout_ms,
            ..v1::Join::default()
        };
        let first = v1::SessionRequest {
            request: Some(Request::Join(join)),
        };
        requests.send(first).await?;
        let mut client = GroupsClient::new(channel);
        let answers = client.session(ReceiverStream::new(outgoing)).await?;
        let mut member = Self {
            requests,
            answers: answers.into_inner(),
            generation: 0,
        };
        while member.generation == 0 {
            member.next().await?;
        }
        Ok(member)
    }

    async fn beat(&self, sequence: u64) -> Result<()> {
        let request = Some(Request::Heartbeat(v1::Heartbeat { sequence }));
        Ok(self.requests.send(v1::SessionRequest { request }).await?)
    }

    /// Takes in the next answer; the heartbeat it acknowledges.
    async fn next(&mut self) -> Result<Option<u64>> {
        let next = timeout(LIMIT, self.answers.message()).await?;
        let response = next?.context("the stream has ended")?;
        match response.response.context("an answer without content")? {
            Response::Heartbeat(ack) => return Ok(Some(ack.sequence)),
            Response::Update(update) => self.generation = update.generation,
            Response::Joined(_) | Response::Done(_) => {}
            Response::Error(error) => bail!("the session is over: {error:?}"),
        }
        Ok(None)
    }

    async fn acked(&mut self, sequence: u64) -> Result<()> {
        while self.next().await? != Some(sequence) {}
        Ok(())
    }
}

/// Connects to the only broker, once it coordinates.
async fn connect(cluster: &Cluster) -> Result<Channel> {
    let address = format!("http://{}", cluster.nodes[0].address());
    let channel = Endpoint::from_shared(address)?.connect().await?;
    let mut client = GroupsClient::new(channel.clone());
    let group = GROUP.to_owned();
    let ready = async {
        loop {
            let request = v1::FindCoordinatorRequest {
                group: group.clone(),
            };
            client.find_coordinator(request).await?;
            let request = v1::DescribeGroupRequest {
                group: group.clone(),
            };
            let answer = client.describe_group(request).await?.into_inner();
            if answer
                .error
                .is_some_and(|it| it.code() == ErrorCode::UnknownGroup)
            {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, ready).await??;
    Ok(channel)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    Ok(builder.enable_all().build()?)
}

#[test]
fn coordinator_frozen_for_longer_than_sessions_last_expires_nobody_that_was_on_time() -> Result<()>
{
    let mut cluster = Cluster::start(&bins(), 1)?;
    runtime()?.block_on(async {
        let channel = connect(&cluster).await?;
        let mut members = Vec::new();
        for _ in 0..3 {
            members.push(Member::start(channel.clone(), 2000).await?);
        }
        for member in &mut members {
            member.beat(1).await?;
            member.acked(1).await?;
        }
        cluster.node(0)?.pause()?;
        // On time, and heard only after the freeze.
        for sequence in 2..=6 {
            for member in &members {
                member.beat(sequence).await?;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        cluster.node(0)?.resume()?;
        for member in &mut members {
            member.acked(6).await?;
            member.beat(7).await?;
        }
        for member in &mut members {
            member.acked(7).await?;
            ensure!(member.generation == 3, "somebody has expired");
        }
        anyhow::Ok(())
    })?;
    cluster.stop()
}

#[test]
fn bytes_that_are_no_message_end_their_stream_and_no_other() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    runtime()?.block_on(async {
        let channel = connect(&cluster).await?;
        let mut member = Member::start(channel.clone(), 60_000).await?;
        // Its first field is a number, where a session has a join.
        let riddle = v1::Heartbeat { sequence: 7 };
        let codec = tonic_prost::ProstCodec::<v1::Heartbeat, v1::SessionResponse>::default();
        let mut raw = tonic::client::Grpc::new(channel);
        raw.ready().await?;
        let path = PathAndQuery::from_static("/qute.v1.Groups/Session");
        let requests = tonic::Request::new(futures::stream::iter([riddle]));
        let answers = raw.streaming(requests, path, codec).await;
        let refused = match answers {
            Ok(answers) => timeout(LIMIT, answers.into_inner().message()).await?.err(),
            Err(status) => Some(status),
        };
        ensure!(refused.is_some(), "nonsense was taken");
        member.beat(1).await?;
        member.acked(1).await
    })?;
    cluster.stop()
}
