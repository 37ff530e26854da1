//! Administration, and connecting, against brokers that answer too late or not at all.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fake::{Fake, TOPIC};
use qute_client::{
    Client, ClientConfig, ErrorKind, OffsetQuery, OffsetSpec, Record, TopicChanges,
    TopicDescription, TopicSpec,
};

/// An address that refuses connections.
async fn refused_address() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().to_string()
}

#[tokio::test]
async fn connect_to_nobody_names_the_cause_for_each_endpoint() {
    let (a, b) = (refused_address().await, refused_address().await);
    let began = Instant::now();
    let error = Client::connect(&format!("{a},{b}")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let named: Vec<_> = error
        .endpoints()
        .iter()
        .map(|f| f.endpoint.clone())
        .collect();
    assert!(named.contains(&a) && named.contains(&b), "{error}");
    for failure in error.endpoints() {
        assert!(failure.cause.contains("refused"), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn connect_tries_every_address_and_a_silent_one_does_not_hold_it_up() {
    let fake = Fake::start(1, 1).await;
    // Accepts connections and never says a word.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = silent
        .local_addr()
        .map(|address| (silent, address))
        .unwrap();
    let bootstrap = format!(
        "{},{},{}",
        silent.1,
        refused_address().await,
        fake.bootstrap()
    );
    let began = Instant::now();
    let client = Client::connect(&bootstrap).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(client.list_topics().await.unwrap()[0].name, TOPIC);
}

#[tokio::test]
async fn create_topic_is_followed_to_the_controller_and_usable_at_once() {
    let fake = Fake::start(3, 1).await;
    fake.state.lock().controller = 3;
    let client = fake.client().await;
    let topic = client
        .create_topic(TopicSpec::new("new").partitions(3))
        .await
        .unwrap();
    assert_eq!(topic.partitions.len(), 3);
    assert!(
        topic
            .partitions
            .iter()
            .all(|partition| partition.leader.is_some())
    );
    let producer = client.producer(Default::default()).unwrap();
    producer.send(Record::to("new").value("x")).await.unwrap();
    let exists = client
        .create_topic(TopicSpec::new("new"))
        .await
        .unwrap_err();
    assert_eq!(
        (exists.kind(), exists.topic()),
        (ErrorKind::TopicExists, Some("new"))
    );
}

#[tokio::test]
async fn create_topic_whose_answer_is_lost_counts_as_created() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().cut_create = true;
    let client = fake.client().await;
    let topic = client
        .create_topic(TopicSpec::new("new").partitions(2))
        .await
        .unwrap();
    assert_eq!((topic.name.as_str(), topic.partitions.len()), ("new", 2));
}

#[tokio::test]
async fn add_partitions_is_followed_to_the_controller_and_usable_at_once() {
    let fake = Fake::start(3, 1).await;
    fake.state.lock().controller = 3;
    let client = fake.client().await;
    let topic = client.add_partitions(TOPIC, 4).await.unwrap();
    assert_eq!(topic.partitions.len(), 4);
    assert!(topic.partitions.iter().all(|one| one.leader.is_some()));
    let producer = client.producer(Default::default()).unwrap();
    let record = Record::to(TOPIC).partition(3).value("x");
    assert_eq!(producer.send(record).await.unwrap().partition, 3);
    // As many as there are: nothing is done.
    let index = fake.state.lock().cluster_index;
    assert_eq!(
        client
            .add_partitions(TOPIC, 4)
            .await
            .unwrap()
            .partitions
            .len(),
        4
    );
    assert_eq!(fake.state.lock().cluster_index, index);
}

#[tokio::test]
async fn add_partitions_whose_answer_is_lost_adds_them_once() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().cut_add = true;
    let client = fake.client().await;
    let topic = client.add_partitions(TOPIC, 3).await.unwrap();
    assert_eq!(topic.partitions.len(), 3);
    assert_eq!(fake.state.lock().topics[TOPIC].1.len(), 3);
}

#[tokio::test]
async fn add_partitions_whose_answer_is_lost_succeeds_though_somebody_has_added_more() {
    let fake = Fake::start(1, 1).await;
    fake.change(|state| {
        state.cut_add = true;
        state.added_elsewhere = 2;
    });
    let client = fake.client().await;
    let topic = client.add_partitions(TOPIC, 3).await.unwrap();
    assert_eq!(topic.partitions.len(), 5);
    let fewer = client.add_partitions(TOPIC, 3).await.unwrap_err();
    assert_eq!(fewer.kind(), ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn add_partitions_that_can_not_be_is_refused_with_the_topic_named() {
    let fake = Fake::start(1, 3).await;
    let client = fake.client().await;
    for (name, partitions, kind) in [
        (TOPIC, 2, ErrorKind::InvalidArgument),
        (TOPIC, 1025, ErrorKind::InvalidArgument),
        ("nope", 4, ErrorKind::UnknownTopic),
    ] {
        let refused = client.add_partitions(name, partitions).await.unwrap_err();
        assert_eq!((refused.kind(), refused.topic()), (kind, Some(name)));
    }
    let refused = client.add_partitions("../x", 4).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidTopicName);
}

#[tokio::test]
async fn alter_topic_changes_what_is_named_and_leaves_the_rest() {
    let fake = Fake::start(3, 1).await;
    fake.change(|state| {
        state.controller = 3;
        let config = HashMap::from([("segment_bytes".to_owned(), "65536".to_owned())]);
        state.configs.insert(TOPIC.to_owned(), config);
    });
    let client = fake.client().await;
    let changes = TopicChanges::new().set("retention_ms", "5000");
    let topic = client.alter_topic(TOPIC, changes).await.unwrap();
    let expected = [("retention_ms", "5000"), ("segment_bytes", "65536")];
    let config = |topic: &TopicDescription| -> Vec<(String, String)> {
        topic.config.clone().into_iter().collect()
    };
    assert_eq!(
        config(&topic),
        expected.map(|(key, value)| (key.to_owned(), value.to_owned()))
    );
    let changes = TopicChanges::new().unset("retention_ms");
    let topic = client.alter_topic(TOPIC, changes).await.unwrap();
    assert_eq!(topic.config.len(), 1);
}

#[tokio::test]
async fn alter_topic_whose_answer_is_lost_succeeds() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().cut_alter = true;
    let client = fake.client().await;
    let changes = TopicChanges::new().set("retention_ms", "5000");
    let topic = client.alter_topic(TOPIC, changes).await.unwrap();
    assert_eq!(topic.config["retention_ms"], "5000");
}

#[tokio::test]
async fn alter_topic_that_can_not_be_is_refused_with_the_topic_named() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let good = TopicChanges::new().set("retention_ms", "1");
    for (name, changes, kind) in [
        (
            TOPIC,
            TopicChanges::new().set("colour", "1"),
            ErrorKind::InvalidArgument,
        ),
        (
            TOPIC,
            good.clone().unset("colour"),
            ErrorKind::InvalidArgument,
        ),
        ("nope", good.clone(), ErrorKind::UnknownTopic),
    ] {
        let refused = client.alter_topic(name, changes).await.unwrap_err();
        assert_eq!((refused.kind(), refused.topic()), (kind, Some(name)));
    }
    let refused = client.alter_topic("../x", good).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidTopicName);
    assert_eq!(fake.state.lock().configs.len(), 0);
}

#[test]
fn topic_changes_keep_the_last_word_on_each_setting() {
    let changes = TopicChanges::new().set("a", "1").unset("a").unset("b");
    assert_eq!((changes.set.len(), changes.unset.len()), (0, 2));
    let changes = changes.set("b", "2");
    assert_eq!((changes.set["b"].as_str(), changes.unset.len()), ("2", 1));
}

#[tokio::test]
async fn cluster_info_tells_the_faults_of_all_brokers() {
    let fake = Fake::start(3, 1).await;
    let client = fake.client().await;
    assert!(client.cluster_info().await.unwrap().faults.is_empty());
    let addresses = fake.change(|state| {
        for broker in [1, 3] {
            let fault = format!("replica {broker} has stopped");
            state.faults.insert(broker, vec![fault]);
        }
        state.addresses.clone()
    });
    assert_eq!(
        client.cluster_info().await.unwrap().faults,
        [
            format!("{}: replica 1 has stopped", addresses[&1]),
            format!("{}: replica 3 has stopped", addresses[&3]),
        ]
    );
}

#[tokio::test]
async fn broker_status_is_that_of_the_broker_at_this_address() {
    let fake = Fake::start(2, 1).await;
    let client = fake.client().await;
    let address = fake.change(|state| {
        state.faults.insert(2, vec!["no disk".to_owned()]);
        state.addresses[&2].to_string()
    });
    let status = client.broker_status(&address).await.unwrap();
    assert_eq!((status.address.as_str(), status.id.0), (&*address, 2));
    assert_eq!(status.faults, ["no disk"]);
    assert_eq!(status.view.faults, Vec::<String>::new());
    assert_eq!(
        status.cluster_id,
        client.cluster_info().await.unwrap().cluster_id
    );
    // What a broker doesn't tell is no number.
    assert_eq!(
        (status.clock, status.storage, status.replicas),
        (None, None, None)
    );
    fake.change(|state| state.told_ms = 1);
    let clock = client.broker_status(&address).await.unwrap().clock.unwrap();
    assert!(clock.time_ms == 1 && clock.ahead_ms < 0);

    let error = client
        .broker_status(&refused_address().await)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    for no_address in ["", "a:x", "a:1,b:1"] {
        let error = client.broker_status(no_address).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{no_address}");
    }
}

#[tokio::test]
async fn create_topic_of_a_bad_name_asks_nobody() {
    let client = Client::lazy(ClientConfig::new(&refused_address().await).unwrap()).unwrap();
    for name in ["", ".", "..", "__x", "a/b", "../x"] {
        let refused = client.create_topic(TopicSpec::new(name)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidTopicName, "{name:?}");
    }
}

#[tokio::test]
async fn describe_topic_gives_leaders_and_offsets_and_deleted_ones_are_unknown() {
    let fake = Fake::start(2, 2).await;
    fake.state.lock().partition(1).leader = (0, 0);
    let client = fake.client().await;
    let producer = client.producer(Default::default()).unwrap();
    producer
        .send(Record::to(TOPIC).partition(0).value("x"))
        .await
        .unwrap();
    let topic = client.describe_topic(TOPIC).await.unwrap();
    let (first, second) = (&topic.partitions[0], &topic.partitions[1]);
    assert_eq!(
        (first.log_start_offset, first.high_watermark),
        (Some(0), Some(1))
    );
    assert_eq!((second.leader, second.high_watermark), (None, None));
    client.delete_topic(TOPIC).await.unwrap();
    let unknown = client.describe_topic(TOPIC).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::UnknownTopic);
    let unknown = client.delete_topic(TOPIC).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::UnknownTopic);
}

#[tokio::test]
async fn delete_topic_is_not_held_up_by_a_controller_that_never_answers() {
    let fake = Fake::start(2, 1).await;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let client = Client::connect_with(config.call_timeout(Duration::from_secs(60)))
        .await
        .unwrap();
    // Its connection lives, and another one has been elected since.
    fake.state.lock().deposed_on_delete = Some(2);
    client.delete_topic(TOPIC).await.unwrap();
    assert!(fake.state.lock().topics.is_empty());
}

#[tokio::test]
async fn s28_delete_made_again_leaves_the_next_incarnation_alone() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let id = |fake: &Fake| fake.state.lock().topics.get(TOPIC).map(|(id, _)| *id);
    let before = id(&fake);
    fake.state.lock().recreate_after_delete = true;
    client.delete_topic(TOPIC).await.unwrap();
    let after = id(&fake);
    assert!(after.is_some() && after != before);
    let seen = client.describe_topic(TOPIC).await.unwrap();
    assert_eq!(Some(seen.id), after);
}

#[tokio::test]
async fn cluster_info_takes_one_round_whoever_is_silent() {
    let fake = Fake::start(2, 1).await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let bootstrap = format!("{},{}", silent.local_addr().unwrap(), fake.bootstrap());
    let client = Client::lazy(ClientConfig::new(&bootstrap).unwrap()).unwrap();
    let began = Instant::now();
    let info = client.cluster_info().await.unwrap();
    assert!(info.is_complete());
    assert_eq!(client.brokers().await.unwrap().len(), 2);
    assert!(began.elapsed() < Duration::from_secs(3));
    let nobody =
        Client::lazy(ClientConfig::new(&silent.local_addr().unwrap().to_string()).unwrap());
    let began = Instant::now();
    let error = nobody.unwrap().cluster_info().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(began.elapsed() < Duration::from_millis(3500));
}

#[tokio::test]
async fn cluster_info_believes_a_controller_only_if_it_says_so_itself() {
    let fake = Fake::start(2, 1).await;
    let first = fake.bootstrap().split(',').next().unwrap().to_owned();
    let client = Client::lazy(ClientConfig::new(&first).unwrap()).unwrap();
    // The other one leads: it is asked too, though only the first is known.
    fake.state.lock().controller = 2;
    let info = client.cluster_info().await.unwrap();
    assert_eq!(info.controller.map(|id| id.0), Some(2));
    // One that is not there any more.
    fake.state.lock().controller = 9;
    let info = client.cluster_info().await.unwrap();
    assert_eq!(info.controller, None);
    assert!(!info.is_complete());
}

#[tokio::test]
async fn list_offsets_follows_leaders_that_move() {
    let fake = Fake::start(2, 2).await;
    let client = fake.client().await;
    fake.state.lock().partition(1).leader = (2, 6);
    let listed = client
        .list_offsets(TOPIC, &[(1, OffsetSpec::End), (0, OffsetSpec::Start)])
        .await
        .unwrap();
    let numbers: Vec<_> = listed
        .iter()
        .map(|offset| (offset.partition, offset.leader_epoch))
        .collect();
    assert_eq!(numbers, [(1, 6), (0, 5)]);
}

#[tokio::test]
async fn list_offsets_of_many_topics_gives_each_its_own_result() {
    let fake = Fake::start(2, 3).await;
    let client = fake.client().await;
    client
        .create_topic(TopicSpec::new("other").partitions(2))
        .await
        .unwrap();
    {
        let mut state = fake.state.lock();
        state.partition(1).leader = (2, 6);
        state.partition(2).next_offset = 7;
        state.offset_calls = 0;
    }
    let query = |topic: &str, partition| OffsetQuery::new(topic, partition, OffsetSpec::End);
    let listed = client
        .list_offsets_many(&[
            query(TOPIC, 2),
            query("none", 0),
            query("other", 1),
            query(TOPIC, 9),
            query(TOPIC, 1),
        ])
        .await;
    let seen: Vec<_> = listed
        .iter()
        .map(|result| match result {
            Ok(listed) => Ok((listed.partition, listed.offset, listed.leader_epoch)),
            Err(error) => Err((error.kind(), error.topic())),
        })
        .collect();
    assert_eq!(
        seen,
        [
            Ok((2, 7, 5)),
            Err((ErrorKind::UnknownTopic, Some("none"))),
            Ok((1, 0, 1)),
            Err((ErrorKind::UnknownPartition, Some(TOPIC))),
            Ok((1, 0, 6)),
        ]
    );
    // Broker 1 for all that it was thought to lead, then the one that moved.
    assert_eq!(fake.state.lock().offset_calls, 2);
    assert!(client.list_offsets_many(&[]).await.is_empty());
}

#[tokio::test]
async fn list_offsets_of_a_vanished_topic_does_not_hold_up_the_others() {
    let fake = Fake::start(2, 2).await;
    let client = fake.client().await;
    client
        .create_topic(TopicSpec::new("other").partitions(1))
        .await
        .unwrap();
    // Both wait for a leader; then one topic seems to vanish, and nobody can say what became of it.
    fake.change(|state| {
        for number in 0..2 {
            state.partition(number).leader = (0, 0);
        }
        state.topics.get_mut("other").unwrap().1[0].leader = (0, 0);
    });
    let query = |topic: &str, partition| OffsetQuery::new(topic, partition, OffsetSpec::End);
    let listing = tokio::spawn({
        let client = client.clone();
        let queries = [query("other", 0), query(TOPIC, 0), query(TOPIC, 1)];
        async move { client.list_offsets_many(&queries).await }
    });
    let calls = fake.state.lock().metadata.total;
    fake.wait_for(|fake| fake.state.lock().metadata.total >= calls + 2)
        .await;
    fake.change(|state| {
        state.cluster_index += 1;
        state.controller = 99;
        state.topics.remove("other").unwrap();
        state.partition(0).leader = (1, 6);
        state.partition(1).leader = (2, 6);
    });
    let listed = listing.await.unwrap();
    let kinds: Vec<_> = listed
        .iter()
        .map(|result| result.as_ref().map(|listed| listed.leader_epoch))
        .map(|result| result.map_err(qute_client::Error::kind))
        .collect();
    assert_eq!(kinds, [Err(ErrorKind::Timeout), Ok(6), Ok(6)]);
}

#[tokio::test]
async fn list_offsets_of_a_topic_that_is_made_anew_or_deleted_meanwhile_says_so() {
    for (anew, kind) in [
        (true, ErrorKind::TopicRecreated),
        (false, ErrorKind::UnknownTopic),
    ] {
        let fake = Fake::start(1, 1).await;
        let client = fake.client().await;
        fake.set_leader(0, 0, 0);
        let listing = tokio::spawn({
            let client = client.clone();
            async move { client.list_offsets(TOPIC, &[(0, OffsetSpec::End)]).await }
        });
        // It has the old incarnation in hand and waits for its leader.
        let calls = fake.state.lock().metadata.total;
        while fake.state.lock().metadata.total < calls + 2 {
            tokio::task::yield_now().await;
        }
        fake.change(|state| {
            state.cluster_index += 1;
            let (_, partitions) = state.topics.remove(TOPIC).unwrap();
            if anew {
                let id = qute_client::TopicId::random();
                state.topics.insert(TOPIC.to_owned(), (id, partitions));
            }
        });
        let error = listing.await.unwrap().unwrap_err();
        assert_eq!((error.kind(), error.topic()), (kind, Some(TOPIC)));
    }
}

#[tokio::test]
async fn s28_other_cluster_at_a_known_address_is_not_believed() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.change(|state| {
        state.cluster_id = qute_client::ClusterId::random();
        state.topics.clear();
        state.cluster_index += 100;
    });
    let error = client.list_offsets("other", &[(0, OffsetSpec::End)]);
    let error = tokio::time::timeout(Duration::from_secs(8), error)
        .await
        .unwrap()
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::WrongCluster | ErrorKind::Timeout),
        "{error}"
    );
}
