//! What the kit promises, each once, against its own embedded brokers.

use std::time::Duration;

use futures::StreamExt;
use qute_client::{Client, ClientConfig, Position, ProducerConfig, Record};
use qute_test::{Call, Cluster, Fault, Proxy, Refusal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TOPIC: &str = "t";

async fn values(client: &Client) -> Result<Vec<String>, qute_client::Error> {
    let consumer = client.consumer(TOPIC).start(Position::Start).until_end();
    let mut records = consumer.open().await?;
    let mut values = Vec::new();
    while let Some(record) = records.next().await {
        let value = record?.value.unwrap_or_default();
        values.push(String::from_utf8_lossy(&value).into_owned());
    }
    Ok(values)
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_killed_is_replaced_and_comes_back_with_its_data() -> Outcome {
    let mut cluster = Cluster::start(3).await?;
    cluster.create_topic(TOPIC, 1).await?;
    let client = cluster.client().await?;
    let producer = client.producer(ProducerConfig::default())?;
    producer.send(Record::to(TOPIC).value("0")).await?;
    let leader = cluster.leader_of(TOPIC, 0).await?;
    let id = cluster.broker_id(leader)?;
    cluster.kill(leader).await?;
    assert!(cluster.broker_id(leader).is_err());
    producer.send(Record::to(TOPIC).value("1")).await?;
    assert_ne!(cluster.leader_of(TOPIC, 0).await?, leader);
    cluster.restart(leader).await?;
    assert_eq!(cluster.broker_id(leader)?, id);
    // Now it is needed for a majority.
    cluster.kill((leader + 1) % 3).await?;
    producer.send(Record::to(TOPIC).value("2")).await?;
    assert_eq!(values(&client).await?, ["0", "1", "2"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_messages_do_what_they_say() -> Outcome {
    let cluster = Cluster::start(1).await?;
    cluster.create_topic(TOPIC, 2).await?;
    let client = cluster.client().await?;
    let producer = client.producer(ProducerConfig::default())?;
    let proxy = cluster.proxy(0)?;
    let send = |value: &'static str| producer.send(Record::to(TOPIC).partition(0).value(value));

    proxy.restart_counts();
    let dropped = proxy.inject(Fault::drop_request(Call::Produce).times(1));
    assert_eq!(send("0").await?.offset, 0);
    let lost = proxy.inject(Fault::drop_reply(Call::Produce).times(1));
    assert_eq!(send("1").await?.offset, 1);
    let refused = proxy.inject(Fault::refuse(Call::Produce, Refusal::not_leader()).times(2));
    assert_eq!(send("2").await?.offset, 2);
    let hits = [&dropped, &lost, &refused].map(|fault| fault.hits());
    assert_eq!(hits, [1, 1, 2]);
    // Each of the three records once, and again for each time that it failed.
    assert_eq!(proxy.count(Call::Produce), 3 + 4);

    let other = proxy.inject(Fault::refuse(Call::Produce, Refusal::not_leader()).partition(1));
    assert_eq!(send("3").await?.offset, 3);
    assert_eq!(other.hits(), 0);

    let slow = cluster
        .delay_leader(TOPIC, 0, Duration::from_millis(50))
        .await?;
    let begun = tokio::time::Instant::now();
    send("4").await?;
    assert!(begun.elapsed() >= Duration::from_millis(50));
    assert_eq!(slow[0].hits(), 1);
    proxy.clear();

    // A reader whose stream is cut goes on where it was.
    let mut reader = client.consumer(TOPIC).start(Position::Start).open().await?;
    for wanted in ["0", "1", "2"] {
        let record = reader.next().await.ok_or("the stream has ended")??;
        assert_eq!(record.value.as_deref(), Some(wanted.as_bytes()));
    }
    proxy.cut_streams(Call::Fetch);
    send("5").await?;
    for wanted in ["3", "4", "5"] {
        let record = reader.next().await.ok_or("the stream has ended")??;
        assert_eq!(record.value.as_deref(), Some(wanted.as_bytes()));
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn reply_swallowed_leaves_the_call_waiting() -> Outcome {
    let cluster = Cluster::start(1).await?;
    let proxy = cluster.proxy(0)?;
    let mut client = qute_test::wire::cluster_client::ClusterClient::connect(format!(
        "http://{}",
        proxy.address()
    ))
    .await?;
    let swallowed = proxy.inject(Fault::swallow_reply(Call::Hello).times(1));
    let edited = proxy.inject(Fault::edit_reply(
        Call::Hello,
        |hello: &mut qute_test::wire::HelloResponse| hello.version = "edited".to_owned(),
    ));
    let mut waiting = client.clone();
    let waiting = tokio::spawn(async move { waiting.hello(hello()).await });
    // A later call on the same connection is answered.
    while swallowed.hits() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(client.hello(hello()).await?.into_inner().version, "edited");
    assert!(!waiting.is_finished());
    assert_eq!((edited.hits(), proxy.in_flight(Call::Hello)), (1, 1));
    assert_eq!(proxy.in_flight_max(Call::Hello), 2);
    proxy.cut_streams(Call::Hello);
    assert!(waiting.await?.is_err());
    cluster.stop().await;
    Ok(())
}

fn hello() -> qute_test::wire::HelloRequest {
    qute_test::wire::HelloRequest::default()
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_connections_do_what_they_say() -> Outcome {
    let cluster = Cluster::start(1).await?;
    cluster.create_topic(TOPIC, 1).await?;
    let proxy = cluster.proxy(0)?;
    let config = ClientConfig::new(&cluster.bootstrap())?;
    // Silence is found out soon.
    let tick = Duration::from_millis(500);
    let config = config
        .call_timeout(Duration::from_secs(60))
        .keep_alive(tick, tick);
    let client = Client::connect_with(config).await?;
    let producer = client.producer(ProducerConfig::default())?;
    let send = |value: &'static str| producer.send(Record::to(TOPIC).value(value));
    send("0").await?;

    // Bytes that wait are not lost, and nothing is sent twice.
    proxy.restart_counts();
    proxy.pause(true);
    let mut waiting = std::pin::pin!(send("1"));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut waiting).await;
    assert!(early.is_err());
    proxy.pause(false);
    assert_eq!(waiting.await?.offset, 1);
    assert_eq!((proxy.count(Call::Produce), proxy.accepted()), (1, 0));

    proxy.reset_connections();
    assert_eq!(send("2").await?.offset, 2);
    assert!(proxy.accepted() > 0);

    proxy.refuse_connections(true).await;
    assert!(TcpStream::connect(proxy.address()).await.is_err());
    proxy.refuse_connections(false).await;

    // What was caught stays silent; a new connection is answered once it is over.
    proxy.black_hole(true);
    let mut caught = std::pin::pin!(send("3"));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut caught).await;
    assert!(early.is_err());
    proxy.black_hole(false);
    let new = Client::connect(&cluster.bootstrap()).await?;
    assert_eq!(new.list_topics().await?.len(), 1);
    // The producer finds out by keep-alive.
    assert_eq!(caught.await?.offset, 3);

    // The same by hand: a connection begun in the hole gets no byte, and no reset, ever.
    let hole = Proxy::start(proxy.address()).await?;
    hole.black_hole(true);
    let mut silent = TcpStream::connect(hole.address()).await?;
    while hole.accepted() == 0 {
        tokio::task::yield_now().await;
    }
    hole.black_hole(false);
    silent
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await?;
    let mut byte = [0_u8];
    let answer = tokio::time::timeout(Duration::from_millis(100), silent.read(&mut byte));
    assert!(answer.await.is_err());
    assert_eq!(hole.open_connections(), 1);
    cluster.stop().await;
    Ok(())
}
