//! Fetch streams of the fake: of leaders, and of followers by script.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use futures::StreamExt;
use qute_proto::batch::BatchHeader;
use qute_proto::v1::fetch_request::Request as FetchKind;
use qute_proto::v1::fetch_response::Response as FetchAnswer;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::{Endpoint, State, error, not_leader};

/// How a broker serves partitions that it does not lead.
#[derive(Clone)]
pub enum Follower {
    /// Up to this offset, and without a word about what lies behind.
    ServeTo(u64),
    /// It ends every subscription with this error.
    Refuse(v1::Error),
    /// It takes subscriptions and never answers.
    Silent,
}

/// What goes wrong, and what was seen.
#[derive(Default)]
pub struct Script {
    /// Brokers without an entry lead or say that they do not.
    pub followers: BTreeMap<u64, Follower>,
    /// Brokers whose streams are open and silent.
    pub frozen: BTreeSet<u64>,
    /// Fetch streams that are open.
    pub sessions: usize,
    /// Every subscription, with the broker that was asked.
    pub subscribed: Vec<(u64, v1::Subscribe)>,
    /// Bytes of batches sent, by broker.
    pub sent_bytes: HashMap<u64, usize>,
    /// Every subscription ends with the word that the topic is gone for good.
    pub topic_gone: bool,
}

impl Script {
    /// Where a partition was subscribed, in order: broker, offset, whether a follower may serve.
    pub fn of_partition(&self, partition: u32) -> Vec<(u64, u64, bool)> {
        self.subscribed
            .iter()
            .filter(|(_, subscribe)| subscribe.partition == partition)
            .map(|(broker, subscribe)| (*broker, subscribe.offset, subscribe.follower))
            .collect()
    }
}

/// One fetch stream.
pub struct Session {
    endpoint: Endpoint,
    answers: mpsc::UnboundedSender<Result<v1::FetchResponse, Status>>,
    subscriptions: BTreeMap<u64, v1::Subscribe>,
    /// Not answered yet.
    unanswered: BTreeSet<u64>,
    /// The high watermark that the client knows, by subscription.
    told: HashMap<u64, u64>,
    credit: i64,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.endpoint.fake.state.lock().fetch.sessions -= 1;
    }
}

impl Session {
    pub(super) fn new(
        endpoint: Endpoint,
        answers: mpsc::UnboundedSender<Result<v1::FetchResponse, Status>>,
    ) -> Self {
        endpoint.fake.state.lock().fetch.sessions += 1;
        Self {
            endpoint,
            answers,
            subscriptions: BTreeMap::new(),
            unanswered: BTreeSet::new(),
            told: HashMap::new(),
            credit: 0,
        }
    }

    pub(super) async fn run(mut self, mut requests: Streaming<v1::FetchRequest>) {
        let mut changed = self.endpoint.fake.changed.subscribe();
        let cuts = self.endpoint.fake.state.lock().fetch_cuts;
        let mut subscribed = false;
        loop {
            if !self.send_all() {
                return;
            }
            {
                let mut state = self.endpoint.fake.state.lock();
                state.served_subscriptions += usize::from(std::mem::take(&mut subscribed));
                if state.fetch_cuts > cuts {
                    let _ = self.answers.send(Err(Status::unavailable("cut")));
                    return;
                }
            }
            tokio::select! {
                request = requests.next() => match request {
                    Some(Ok(request)) => {
                        subscribed = matches!(request.request, Some(FetchKind::Subscribe(_)));
                        self.take(request);
                    }
                    _ => return,
                },
                _ = changed.changed() => {}
            }
        }
    }

    fn take(&mut self, request: v1::FetchRequest) {
        match request.request {
            Some(FetchKind::Subscribe(subscribe)) => {
                let mut state = self.endpoint.fake.state.lock();
                let seen = (self.endpoint.broker, subscribe.clone());
                state.fetch.subscribed.push(seen);
                let id = subscribe.subscription_id;
                self.subscriptions.insert(id, subscribe);
                self.unanswered.insert(id);
            }
            Some(FetchKind::Unsubscribe(unsubscribe)) => {
                self.subscriptions.remove(&unsubscribe.subscription_id);
            }
            Some(FetchKind::Credit(credit)) => self.credit += credit.bytes as i64,
            None => {}
        }
    }

    fn answer(&self, subscription_id: u64, response: FetchAnswer) {
        let _ = self.answers.send(Ok(v1::FetchResponse {
            subscription_id,
            response: Some(response),
        }));
    }

    fn refuse(&mut self, id: u64, refusal: v1::Error) {
        self.subscriptions.remove(&id);
        self.answer(id, FetchAnswer::Error(refusal));
    }

    /// False once the stream is cut.
    fn send_all(&mut self) -> bool {
        let fake = self.endpoint.fake.clone();
        let mut state = fake.state.lock();
        if state.fetch.frozen.contains(&self.endpoint.broker) {
            return true;
        }
        let ids: Vec<u64> = self.subscriptions.keys().copied().collect();
        ids.into_iter().all(|id| self.send(&mut state, id))
    }

    /// How far this broker serves the partition, or why it does not; `None`: it says nothing.
    fn limit(
        &self,
        state: &mut State,
        subscribe: &v1::Subscribe,
    ) -> Option<Result<u64, v1::Error>> {
        if state.fetch.topic_gone {
            return Some(Err(v1::Error {
                authoritative: true,
                ..error(ErrorCode::UnknownTopic)
            }));
        }
        let follower = state.fetch.followers.get(&self.endpoint.broker).cloned();
        let Some(partition) = state.find(&subscribe.topic_id, subscribe.partition) else {
            return Some(Err(error(ErrorCode::UnknownTopic)));
        };
        let (leader, epoch) = partition.leader;
        if leader != self.endpoint.broker {
            return match follower.filter(|_| subscribe.follower) {
                Some(Follower::Silent) => None,
                Some(Follower::Refuse(refusal)) => Some(Err(refusal)),
                Some(Follower::ServeTo(limit)) => Some(Ok(limit.min(partition.next_offset))),
                None => Some(Err(not_leader(leader, epoch))),
            };
        }
        if !(partition.log_start..=partition.next_offset).contains(&subscribe.offset) {
            return Some(Err(v1::Error {
                bounds: Some(v1::OffsetBounds {
                    log_start_offset: partition.log_start,
                    high_watermark: partition.next_offset,
                }),
                ..error(ErrorCode::OffsetOutOfRange)
            }));
        }
        Some(Ok(partition.next_offset))
    }

    fn send(&mut self, state: &mut State, id: u64) -> bool {
        let Some(subscribe) = self.subscriptions.get(&id).cloned() else {
            return true;
        };
        let limit = match self.limit(state, &subscribe) {
            None => return true,
            Some(Ok(limit)) => limit,
            Some(Err(refusal)) => {
                self.refuse(id, refusal);
                return true;
            }
        };
        let partition = state.find(&subscribe.topic_id, subscribe.partition);
        let partition = partition.unwrap().clone();
        if self.unanswered.remove(&id) {
            let subscribed = v1::Subscribed {
                log_start_offset: partition.log_start,
                high_watermark: limit,
                leader_epoch: partition.leader.1,
                follower: partition.leader.0 != self.endpoint.broker,
            };
            self.answer(id, FetchAnswer::Subscribed(subscribed));
            self.told.insert(id, limit);
        }
        let mut starved = false;
        for (base_offset, batch) in &partition.batches {
            let records = BatchHeader::verify(batch).unwrap().record_count;
            let end = base_offset + u64::from(records);
            let subscribe = self.subscriptions.get_mut(&id).unwrap();
            if end <= subscribe.offset || end > limit {
                continue;
            }
            if self.credit <= 0 {
                starved = true;
                continue;
            }
            if let Some(left) = &mut state.cut_fetch_after {
                if *left == 0 {
                    state.cut_fetch_after = None;
                    let _ = self.answers.send(Err(Status::unavailable("cut")));
                    return false;
                }
                *left -= 1;
            }
            subscribe.offset = end;
            self.credit -= batch.len() as i64;
            state.fetched_bytes += batch.len();
            *state
                .fetch
                .sent_bytes
                .entry(self.endpoint.broker)
                .or_default() += batch.len();
            state.fetch_overdraft = state.fetch_overdraft.max(-self.credit);
            let mut bytes = batch.clone();
            if state.flip_bit_in_fetch {
                let mut flipped = batch.to_vec();
                *flipped.last_mut().unwrap() ^= 1;
                bytes = flipped.into();
            }
            let batches = v1::Batches {
                batches: vec![v1::FetchedBatch {
                    base_offset: *base_offset,
                    broker_time_ms: partition.time_of(*base_offset),
                    batch: bytes,
                }],
                high_watermark: limit,
                log_start_offset: partition.log_start,
            };
            self.answer(id, FetchAnswer::Batches(batches));
            self.told.insert(id, limit);
        }
        // As brokers do, if not as seldom.
        if starved && self.told.insert(id, limit) < Some(limit) {
            let batches = v1::Batches {
                batches: Vec::new(),
                high_watermark: limit,
                log_start_offset: partition.log_start,
            };
            self.answer(id, FetchAnswer::Batches(batches));
        }
        true
    }
}
