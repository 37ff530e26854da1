//! What one call has asked and not yet been told: which message is about which partition, and how
//! a refusal of each reads.

use std::collections::HashMap;

use parking_lot::Mutex;
use prost::Message as _;
use qute_client::TopicId;
use qute_proto::v1;
use qute_proto::v1::fetch_request::Request as FetchKind;
use qute_proto::v1::fetch_response::Response as FetchAnswer;
use qute_proto::v1::produce_response::Result as ProduceResult;

use crate::call::Call;
use crate::fault::Place;
use crate::frames::Message;
use crate::meter::{Meters, UnderWay};

/// The requests of one call or stream.
#[derive(Debug)]
pub(crate) struct Ledger {
    call: Call,
    meters: Meters,
    /// By correlation id (produce) or subscription id (fetch).
    items: Mutex<HashMap<u64, (Place, UnderWay)>>,
    /// Of calls that count as a whole.
    _whole: Option<UnderWay>,
}

/// What a request message is, for the script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Faults concern it.
    Item(Option<Place>),
    /// It only steers the stream.
    Steering,
}

impl Ledger {
    pub(crate) fn new(call: Call, meters: &Meters) -> Self {
        let by_item = matches!(call, Call::Produce | Call::Fetch);
        Self {
            call,
            meters: meters.clone(),
            items: Mutex::default(),
            _whole: (!by_item).then(|| meters.begin(call)),
        }
    }

    /// Enters a request.
    pub(crate) fn ask(&self, message: &Message) -> Asked {
        let (id, place) = match self.call {
            Call::Produce => match message.read::<v1::ProduceRequest>() {
                Some(request) => (
                    request.correlation_id,
                    place(&request.topic_id, request.partition),
                ),
                None => return Asked::Steering,
            },
            Call::Fetch => match message.read().and_then(|r: v1::FetchRequest| r.request) {
                Some(FetchKind::Subscribe(subscribe)) => (
                    subscribe.subscription_id,
                    place(&subscribe.topic_id, subscribe.partition),
                ),
                Some(FetchKind::Unsubscribe(unsubscribe)) => {
                    self.items.lock().remove(&unsubscribe.subscription_id);
                    return Asked::Steering;
                }
                Some(FetchKind::Credit(_)) | None => return Asked::Steering,
            },
            _ => return Asked::Item(None),
        };
        let under_way = self.meters.begin(self.call);
        self.items.lock().insert(id, (place.clone(), under_way));
        Asked::Item(Some(place))
    }

    /// Enters a reply, and says what it is about.
    pub(crate) fn told(&self, message: &Message) -> Option<Place> {
        match self.call {
            Call::Produce => {
                let reply: v1::ProduceResponse = message.read()?;
                let item = self.items.lock().remove(&reply.correlation_id);
                item.map(|(place, _)| place)
            }
            Call::Fetch => {
                let reply: v1::FetchResponse = message.read()?;
                let mut items = self.items.lock();
                match reply.response {
                    Some(FetchAnswer::Error(_)) => items.remove(&reply.subscription_id),
                    _ => {
                        let item = items.get(&reply.subscription_id);
                        return item.map(|(place, _)| place.clone());
                    }
                }
                .map(|(place, _)| place)
            }
            _ => None,
        }
    }

    /// The answer that refuses this request; `None` if there is no place for it.
    pub(crate) fn refusal(&self, message: &Message, error: v1::Error) -> Option<Message> {
        let error = Some(error);
        let body = match self.call {
            Call::Produce => {
                let request: v1::ProduceRequest = message.read()?;
                let correlation_id = request.correlation_id;
                self.items.lock().remove(&correlation_id);
                let result = error.map(ProduceResult::Error);
                v1::ProduceResponse {
                    correlation_id,
                    result,
                }
                .encode_to_vec()
            }
            Call::Fetch => {
                let request: v1::FetchRequest = message.read()?;
                let Some(FetchKind::Subscribe(subscribe)) = request.request else {
                    return None;
                };
                let subscription_id = subscribe.subscription_id;
                self.items.lock().remove(&subscription_id);
                v1::FetchResponse {
                    subscription_id,
                    response: error.map(FetchAnswer::Error),
                }
                .encode_to_vec()
            }
            Call::ListOffsets => {
                let request: v1::ListOffsetsRequest = message.read()?;
                let refused = |_| v1::OffsetAnswer {
                    error: error.clone(),
                    ..v1::OffsetAnswer::default()
                };
                let answers = request.queries.iter().map(refused).collect();
                v1::ListOffsetsResponse { answers }.encode_to_vec()
            }
            Call::Metadata | Call::WatchMetadata => v1::MetadataResponse {
                error,
                ..v1::MetadataResponse::default()
            }
            .encode_to_vec(),
            Call::CreateTopic => v1::CreateTopicResponse {
                error,
                ..v1::CreateTopicResponse::default()
            }
            .encode_to_vec(),
            Call::AddPartitions => v1::AddPartitionsResponse {
                error,
                ..v1::AddPartitionsResponse::default()
            }
            .encode_to_vec(),
            Call::DeleteTopic => v1::DeleteTopicResponse {
                error,
                ..v1::DeleteTopicResponse::default()
            }
            .encode_to_vec(),
            _ => return None,
        };
        Some(Message::plain(body.into()))
    }
}

fn place(topic: &[u8], partition: u32) -> Place {
    Place {
        topic: TopicId::from_wire(topic),
        partition,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(message: &impl prost::Message) -> Message {
        Message::plain(message.encode_to_vec().into())
    }

    #[test]
    fn produce_requests_are_under_way_until_their_reply() {
        let meters = Meters::default();
        let ledger = Ledger::new(Call::Produce, &meters);
        for correlation_id in [1, 2] {
            let request = v1::ProduceRequest {
                correlation_id,
                partition: 7,
                ..v1::ProduceRequest::default()
            };
            ledger.ask(&message(&request));
        }
        let reply = v1::ProduceResponse {
            correlation_id: 1,
            result: None,
        };
        let about = ledger.told(&message(&reply)).unwrap();
        assert_eq!(about.partition, 7);
        assert_eq!(meters.in_flight(Call::Produce), 1);
        drop(ledger);
        assert_eq!(meters.in_flight(Call::Produce), 0);
        assert_eq!(meters.in_flight_max(Call::Produce), 2);
    }

    #[test]
    fn refusal_of_an_offsets_call_answers_each_query() {
        let ledger = Ledger::new(Call::ListOffsets, &Meters::default());
        let request = v1::ListOffsetsRequest {
            queries: vec![v1::OffsetQuery::default(); 3],
        };
        let refusal = ledger
            .refusal(&message(&request), v1::Error::default())
            .unwrap();
        let reply: v1::ListOffsetsResponse = refusal.read().unwrap();
        assert_eq!(reply.answers.len(), 3);
        assert!(reply.answers.iter().all(|answer| answer.error.is_some()));
    }
}
