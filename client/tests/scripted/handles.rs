//! What the types themselves promise: handles cross threads and are cheap to clone, futures are `Send`.

#![allow(dead_code, reason = "compiling is the test")]

use std::time::Duration;

use futures::{Sink, Stream};
use qute_client::{
    BatchConsumer, Client, ClientConfig, ClientStats, CloseReport, ConsumedRecord, Consumer,
    ConsumerBuilder, ConsumerControl, ConsumerEvent, DeadLetter, Error, EventConsumer, OffsetSpec,
    Position, Producer, ProducerConfig, ProducerSink, Record, Reservation, Result, Ticket,
    TopicChanges, TopicSpec, TraceContext, TypedConsumer, TypedProducer, TypedRecord, Utf8Codec,
};

fn shared<T: Send + Sync + 'static>() {}
fn cloned<T: Clone + Send + Sync + 'static>() {}
fn sent<T: Send>(_future: T) {}
fn stream<T: Stream + Unpin + Send>() {}

#[test]
fn public_handles_are_send_and_sync() {
    cloned::<Client>();
    cloned::<ClientConfig>();
    cloned::<Producer>();
    cloned::<ProducerConfig>();
    cloned::<ConsumerBuilder>();
    cloned::<ConsumerControl>();
    cloned::<TypedProducer<String, String>>();
    cloned::<Error>();
    cloned::<(Record, ConsumedRecord, ConsumerEvent)>();
    cloned::<(ClientStats, CloseReport, DeadLetter, TraceContext)>();
    cloned::<TypedRecord<String>>();
    shared::<(Consumer, BatchConsumer, EventConsumer)>();
    shared::<(TypedConsumer<String>, ProducerSink, Reservation, Ticket)>();
}

#[test]
fn public_streams_and_sinks_can_be_used_without_pinning() {
    stream::<Consumer>();
    stream::<BatchConsumer>();
    stream::<EventConsumer>();
    stream::<TypedConsumer<String>>();
    fn sink<T: Sink<Record, Error = Error> + Unpin + Send>() {}
    sink::<ProducerSink>();
}

/// Never called.
fn public_futures_are_send(client: &Client, producer: Producer, control: &ConsumerControl) {
    sent(Client::connect("a:1"));
    sent(Client::from_env());
    sent(client.create_topic(TopicSpec::new("t")));
    sent(client.add_partitions("t", 2));
    sent(client.alter_topic("t", TopicChanges::new()));
    sent(client.delete_topic("t"));
    sent(client.list_topics());
    sent(client.list_all_topics());
    sent(client.describe_topic("t"));
    sent(client.cluster_info());
    sent(client.brokers());
    sent(client.broker_status("a:1"));
    sent(client.list_offsets("t", &[(0, OffsetSpec::End)]));
    sent(client.list_offsets_many(&[]));
    sent(client.wait_for_index(1));
    sent(client.consumer("t").open());
    sent(producer.send(Record::to("t")));
    sent(producer.enqueue(Record::to("t")));
    sent(producer.prepare("t"));
    sent(producer.reserve(1));
    sent(producer.flush());
    sent(control.seek(0, Position::End));
    sent(control.latest_lag());
    let typed = producer
        .typed::<String>("t", Utf8Codec)
        .keys::<String>(Utf8Codec);
    let text = String::new();
    sent(typed.send(&text, &text));
    sent(typed.enqueue(&text, None));
    sent(producer.close(Duration::ZERO));
}

/// Never called: the one ticket type is a future of the crate's own result.
async fn ticket_is_a_future(ticket: Ticket) -> Result<u64> {
    Ok(ticket.await?.offset)
}
