//! Raw gRPC, for requests that no well-behaved client makes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{StreamExt, stream};
use qute_proto::batch::{BatchBuilder, Codec, ProducerStamp, RecordRef};
use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::log_client::LogClient;
use qute_proto::v1::{
    CreateTopicRequest, CreateTopicResponse, Credit, Error, ErrorCode, FetchRequest, FetchResponse,
    ListOffsetsRequest, MetadataRequest, OffsetAnswer, OffsetQuery, ProduceAck, ProduceRequest,
    Subscribe, fetch_request, produce_response,
};
use qute_tests::wait;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};

const LIMIT: Duration = Duration::from_secs(30);

/// A connection of its own to one broker.
pub struct Raw {
    runtime: Runtime,
    channel: Channel,
}

/// What became of a batch: its base offset, or the code of its refusal.
pub type Outcome = std::result::Result<u64, ErrorCode>;

impl Raw {
    pub fn connect(address: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
        let channel = runtime.block_on(endpoint.connect())?;
        Ok(Self { runtime, channel })
    }

    /// The id of the new topic, or the code of the refusal.
    pub fn create_topic(
        &self,
        name: &str,
        partitions: u32,
    ) -> Result<std::result::Result<Bytes, ErrorCode>> {
        let request = CreateTopicRequest {
            name: name.to_owned(),
            partitions,
            replicas: 1,
            ..Default::default()
        };
        let mut client = ClusterClient::new(self.channel.clone());
        let call = async { timeout(LIMIT, client.create_topic(request)).await };
        let response = self.runtime.block_on(call)??.into_inner();
        topic_id(response)
    }

    /// The same with a field that no version knows.
    pub fn create_topic_with_unknown_fields(&self, name: &str) -> Result<()> {
        #[derive(Clone, PartialEq, prost::Message)]
        struct FutureRequest {
            #[prost(string, tag = "1")]
            name: String,
            #[prost(string, tag = "1999")]
            colour: String,
            #[prost(uint64, repeated, tag = "2000")]
            numbers: Vec<u64>,
        }
        let request = FutureRequest {
            name: name.to_owned(),
            colour: "red".to_owned(),
            numbers: vec![1, 2, 3],
        };
        let path = PathAndQuery::from_static("/qute.v1.Cluster/CreateTopic");
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        let call = async {
            client.ready().await?;
            let codec = tonic_prost::ProstCodec::<FutureRequest, CreateTopicResponse>::default();
            let call = client.unary(tonic::Request::new(request), path, codec);
            anyhow::Ok(timeout(LIMIT, call).await??)
        };
        let response = self.runtime.block_on(call)?.into_inner();
        ensure!(topic_id(response)?.is_ok(), "the request was refused");
        Ok(())
    }

    /// Waits until the topic's partition 0 has a leader.
    pub fn wait_leader(&self, topic: &Bytes) -> Result<()> {
        let mut client = ClusterClient::new(self.channel.clone());
        wait::until_true("a leader", wait::LONG, || {
            let call = async { timeout(LIMIT, client.metadata(MetadataRequest::default())).await };
            let metadata = self.runtime.block_on(call)??.into_inner();
            let found = metadata
                .topics
                .iter()
                .find(|found| found.topic_id == *topic);
            let partition = found.and_then(|found| found.partitions.first());
            Ok(partition.is_some_and(|partition| partition.leader != 0))
        })
    }

    /// Sends batches to partition 0 over one stream and waits for all answers.
    pub fn produce(&self, topic: &Bytes, batches: Vec<Bytes>) -> Result<Vec<Outcome>> {
        self.produce_to(topic.clone(), 0, batches)
    }

    /// Sends batches over one stream and waits for all answers.
    pub fn produce_to(
        &self,
        topic_id: Bytes,
        partition: u32,
        batches: Vec<Bytes>,
    ) -> Result<Vec<Outcome>> {
        let answers = self.produce_in_full(topic_id, partition, batches)?;
        let short = |answer: std::result::Result<ProduceAck, Error>| {
            answer
                .map(|ack| ack.base_offset)
                .map_err(|error| error.code())
        };
        Ok(answers.into_iter().map(short).collect())
    }

    /// Sends batches over one stream and waits for all answers, in the order of the batches.
    pub fn produce_in_full(
        &self,
        topic_id: Bytes,
        partition: u32,
        batches: Vec<Bytes>,
    ) -> Result<Vec<std::result::Result<ProduceAck, Error>>> {
        let count = batches.len();
        let request = move |(number, batch)| ProduceRequest {
            correlation_id: number,
            topic_id: topic_id.clone(),
            partition,
            batch,
        };
        let requests: Vec<ProduceRequest> = (0..).zip(batches).map(request).collect();
        let mut client = LogClient::new(self.channel.clone());
        let call = async {
            // The request side stays open until all answers are there.
            let stream = stream::iter(requests).chain(stream::pending());
            let mut responses = client.produce(stream).await?.into_inner();
            let mut answers = vec![None; count];
            for _ in 0..count {
                let response = responses.message().await?.context("the stream has ended")?;
                let place = usize::try_from(response.correlation_id)?;
                let answer = match response.result.context("an empty answer")? {
                    produce_response::Result::Ack(ack) => Ok(ack),
                    produce_response::Result::Error(error) => Err(error),
                };
                let slot = answers.get_mut(place).context("a foreign correlation id")?;
                ensure!(
                    slot.replace(answer).is_none(),
                    "request {place} answered twice"
                );
            }
            answers
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .context("an answer is missing")
        };
        self.runtime
            .block_on(async { timeout(LIMIT, call).await })?
    }

    /// Opens a fetch stream with one subscription, to partition 0.
    pub fn fetch(&self, topic_id: &Bytes, offset: u64) -> Result<Fetch<'_>> {
        let (requests, receiver) = tokio::sync::mpsc::unbounded_channel();
        let subscribe = Subscribe {
            subscription_id: 1,
            topic_id: topic_id.clone(),
            partition: 0,
            offset,
            follower: false,
        };
        requests.send(FetchRequest {
            request: Some(fetch_request::Request::Subscribe(subscribe)),
        })?;
        let stream = stream::unfold(receiver, |mut receiver| async {
            Some((receiver.recv().await?, receiver))
        });
        let mut client = LogClient::new(self.channel.clone());
        let call = async { timeout(LIMIT, client.fetch(stream)).await };
        let responses = self.runtime.block_on(call)??.into_inner();
        Ok(Fetch {
            raw: self,
            requests,
            responses,
        })
    }

    /// Asks for one offset of partition 0.
    pub fn list_offset(
        &self,
        topic_id: &Bytes,
        position: qute_proto::v1::offset_query::Position,
    ) -> Result<OffsetAnswer> {
        let query = OffsetQuery {
            topic_id: topic_id.clone(),
            partition: 0,
            position: Some(position),
        };
        let request = ListOffsetsRequest {
            queries: vec![query],
        };
        let mut client = LogClient::new(self.channel.clone());
        let call = async { timeout(LIMIT, client.list_offsets(request)).await };
        let response = self.runtime.block_on(call)??.into_inner();
        response.answers.into_iter().next().context("no answer")
    }
}

/// An open fetch stream.
pub struct Fetch<'a> {
    raw: &'a Raw,
    requests: tokio::sync::mpsc::UnboundedSender<FetchRequest>,
    responses: tonic::Streaming<FetchResponse>,
}

impl Fetch<'_> {
    /// Gives the broker more bytes to send.
    pub fn credit(&self, bytes: u64) -> Result<()> {
        let request = Some(fetch_request::Request::Credit(Credit { bytes }));
        Ok(self.requests.send(FetchRequest { request })?)
    }

    /// The next response; `None` when none comes within `within`.
    pub fn next(
        &mut self,
        within: Duration,
    ) -> Result<Option<qute_proto::v1::fetch_response::Response>> {
        let next = async { timeout(within, self.responses.message()).await };
        match self.raw.runtime.block_on(next) {
            Err(_) => Ok(None),
            Ok(response) => {
                let response = response?.context("the stream has ended")?;
                ensure!(response.subscription_id == 1, "a foreign subscription");
                Ok(Some(response.response.context("an empty response")?))
            }
        }
    }
}

fn topic_id(response: CreateTopicResponse) -> Result<std::result::Result<Bytes, ErrorCode>> {
    match response.error {
        Some(error) => Ok(Err(error.code())),
        None => Ok(Ok(response
            .topic
            .context("neither topic nor error")?
            .topic_id)),
    }
}

/// A batch of these values, without a producer.
pub fn batch(values: &[&[u8]]) -> Result<Bytes> {
    stamped(values, ProducerStamp::NONE)
}

/// A batch of these values with a producer.
pub fn stamped(values: &[&[u8]], producer: ProducerStamp) -> Result<Bytes> {
    let mut builder = BatchBuilder::new(1 << 20);
    for value in values {
        let record = RecordRef {
            timestamp_ms: 1_700_000_000_000,
            key: None,
            value: Some(value),
            headers: &[],
        };
        builder.push(&record)?;
    }
    Ok(builder.finish(Codec::None)?.seal(producer))
}

/// Sets the checksum to what the bytes call for.
pub fn with_right_checksum(mut batch: Vec<u8>) -> Bytes {
    let crc = crc32c::crc32c(&batch[8..]);
    batch[4..8].copy_from_slice(&crc.to_le_bytes());
    batch.into()
}

/// A zstd batch of `real` zero bytes whose header claims `claimed`.
pub fn bomb(real: usize, claimed: u32) -> Result<Bytes> {
    let body = zstd::bulk::compress(&vec![0; real], 3)?;
    let mut bytes = batch(&[b"x"])?[..64].to_vec();
    bytes[8] = 2;
    bytes[16..20].copy_from_slice(&u32::try_from(body.len())?.to_le_bytes());
    bytes[20..24].copy_from_slice(&claimed.to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(with_right_checksum(bytes))
}
