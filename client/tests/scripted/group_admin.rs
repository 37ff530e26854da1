//! Groups from outside: coordinators that move, keep silent, answer too late; offsets that make no sense.

use std::collections::BTreeMap;
use std::time::Duration;

use qute_client::group::{GroupState, OffsetCommit, OffsetMove, ResetPlan, ResetTo};
use qute_client::{Client, ClientConfig, ErrorKind, OffsetBounds};
use qute_proto::ids::MemberId;
use qute_proto::v1::{self, ErrorCode};

use crate::fake::{Fake, TOPIC, error, groups, not_leader};

const BOUNDS: OffsetBounds = OffsetBounds {
    log_start_offset: 10,
    high_watermark: 100,
};

/// Partitions with the bounds, led by broker 1.
async fn fake(brokers: u64) -> Fake {
    let fake = Fake::start(brokers, 2).await;
    fake.change(|state| {
        for partition in 0..2 {
            let partition = state.partition(partition);
            partition.log_start = BOUNDS.log_start_offset;
            partition.next_offset = BOUNDS.high_watermark;
        }
    });
    fake
}

fn at(partition: u32, offset: u64) -> OffsetCommit {
    OffsetCommit::new(TOPIC, partition, offset)
}

/// A member that holds both partitions.
fn join(fake: &Fake, group: &str) -> MemberId {
    let id = MemberId::random();
    fake.change(|state| {
        let topic_id = state.topics[TOPIC].0.to_wire();
        let group = state.groups.groups.entry(group.to_owned()).or_default();
        let member = v1::Join {
            member_id: id.to_wire(),
            instance: "worker-1".to_owned(),
            topics: vec![v1::TopicSubscription {
                topic_id: topic_id.clone(),
                partitions: 2,
            }],
            assignors: vec![v1::AssignorVersion {
                name: "sticky".to_owned(),
                version: 1,
            }],
            session_timeout_ms: 10_000,
            ..Default::default()
        };
        group.seat(member, &topic_id, 0..2);
    });
    id
}

#[tokio::test]
async fn cluster_that_never_had_a_group_gets_none_by_being_asked_for_one() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    assert_eq!(groups.list().await.unwrap(), []);
    for error in [
        groups.describe("g").await.unwrap_err(),
        groups.delete("g").await.unwrap_err(),
        groups.offsets("g").await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::UnknownGroup, "{error}");
    }
    assert!(!fake.state.lock().topics.contains_key(groups::GROUPS));
    groups.commit("g", [at(0, 50)]).await.unwrap();
    assert!(fake.state.lock().topics.contains_key(groups::GROUPS));
    let listed = groups.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, GroupState::Empty));
    let committed = groups.offsets("g").await.unwrap();
    assert_eq!((committed.len(), committed[0].offset), (1, 50));
    assert_eq!(committed[0].partition.to_string(), format!("{TOPIC}/0"));
}

#[tokio::test]
async fn groups_are_no_topics_to_the_program() {
    let fake = fake(1).await;
    let client = fake.client().await;
    client.groups().commit("g", [at(0, 50)]).await.unwrap();
    let topics = client.list_topics().await.unwrap();
    assert!(topics.iter().all(|topic| topic.name == TOPIC), "{topics:?}");
}

#[tokio::test]
async fn coordinator_that_has_moved_is_followed_by_its_hint() {
    let fake = fake(3).await;
    fake.set_coordinator("g", 1, 1);
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    fake.set_coordinator("g", 3, 2);
    groups.commit("g", [at(0, 60)]).await.unwrap();
    assert_eq!(fake.committed("g", 0), Some(60));
    assert_eq!(groups.describe("g").await.unwrap().coordinator.0, 3);
}

#[tokio::test]
async fn coordinator_hint_of_an_old_epoch_is_not_obeyed() {
    let fake = fake(2).await;
    fake.set_coordinator("g", 1, 5);
    let groups = fake.client().await.groups();
    fake.change(|state| state.groups.refuse.push_back(not_leader(2, 4)));
    groups.commit("g", [at(0, 50)]).await.unwrap();
    assert_eq!(fake.state.lock().groups.calls, [1, 1]);
}

#[tokio::test]
async fn coordinator_that_is_not_ready_is_asked_again() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    let refusals = [ErrorCode::NotReady, ErrorCode::OutcomeUnknown];
    fake.change(|state| state.groups.refuse.extend(refusals.map(error)));
    groups.commit("g", [at(0, 50)]).await.unwrap();
    assert_eq!(fake.state.lock().groups.calls.len(), 3);
}

#[tokio::test]
async fn coordinator_that_keeps_silent_is_left_as_soon_as_another_is_known() {
    let fake = fake(2).await;
    fake.set_coordinator("g", 1, 1);
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    fake.change(|state| state.groups.silent = Some(1));
    let commit = tokio::spawn({
        let groups = groups.clone();
        async move { groups.commit("g", [at(0, 60)]).await }
    });
    fake.set_coordinator("g", 2, 2);
    commit.await.unwrap().unwrap();
    assert_eq!(fake.committed("g", 0), Some(60));
}

#[tokio::test]
async fn coordinator_that_never_answers_costs_no_more_than_the_call_timeout() {
    let fake = fake(1).await;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let config = config.call_timeout(Duration::from_millis(300));
    let groups = Client::connect_with(config).await.unwrap().groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    fake.change(|state| state.groups.silent = Some(1));
    let error = groups.describe("g").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("group g"), "{error}");
}

#[tokio::test]
async fn calls_whose_answers_were_lost_are_repeated_and_come_to_the_same() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    let cut = || fake.change(|state| state.groups.cut_calls = 1);
    cut();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    assert_eq!(fake.committed("g", 0), Some(50));
    cut();
    groups.delete("g").await.unwrap();
    assert_eq!(groups.list().await.unwrap(), []);
    let gone = groups.delete("g").await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::UnknownGroup);
}

#[tokio::test]
async fn commit_outside_of_what_the_partition_holds_is_refused_with_the_bounds() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    for offset in [9, 101] {
        let error = groups
            .commit("g", [at(0, 50), at(1, offset)])
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OffsetOutOfRange);
        assert_eq!((error.partition(), error.offset()), (Some(1), Some(offset)));
        assert_eq!(error.bounds(), Some(BOUNDS));
    }
    assert_eq!(fake.committed("g", 0), None, "nothing of it was committed");
    groups.commit("g", [at(0, 10), at(1, 100)]).await.unwrap();
    groups.commit_unchecked("g", [at(1, 500)]).await.unwrap();
    assert_eq!(fake.committed("g", 1), Some(500));
}

#[tokio::test]
async fn commit_behind_what_is_committed_says_so_and_commits_the_rest() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    let error = groups
        .commit("g", [at(0, 40), at(1, 40)])
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OffsetBehind);
    assert_eq!((error.partition(), error.offset()), (Some(0), Some(50)));
    assert_eq!(
        (fake.committed("g", 0), fake.committed("g", 1)),
        (Some(50), Some(40))
    );
}

#[tokio::test]
async fn commit_that_names_what_is_not_there_is_refused() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    let kind = async |offset| groups.commit("g", [offset]).await.unwrap_err().kind();
    assert_eq!(kind(at(2, 50)).await, ErrorKind::UnknownPartition);
    assert_eq!(
        kind(OffsetCommit::new("no", 0, 0)).await,
        ErrorKind::UnknownTopic
    );
    let long = at(0, 50).metadata("x".repeat(4097));
    assert_eq!(kind(long).await, ErrorKind::InvalidArgument);
    let named = groups.commit("", [at(0, 50)]).await.unwrap_err();
    assert_eq!(named.kind(), ErrorKind::InvalidGroupName);
}

#[tokio::test]
async fn commit_for_a_group_with_members_is_theirs() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    join(&fake, "g");
    let error = groups.commit("g", [at(0, 50)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::GroupNotEmpty);
    let error = groups.delete("g").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::GroupNotEmpty);
}

#[tokio::test]
async fn groups_of_all_partitions_are_listed_page_by_page_by_name() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    let names: Vec<String> = (0..23).map(|n| format!("g{n:02}")).collect();
    for name in &names {
        groups.commit_unchecked(name, [at(0, 50)]).await.unwrap();
    }
    let listed = groups.list().await.unwrap();
    let listed: Vec<_> = listed.into_iter().map(|it| it.group).collect();
    assert_eq!(listed, names);
}

#[tokio::test]
async fn group_is_described_with_members_claims_offsets_and_lag() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50).metadata("m")]).await.unwrap();
    let member = join(&fake, "g");
    let described = groups.describe("g").await.unwrap();
    let it = &described.members[0];
    assert_eq!((it.id, it.instance.as_deref()), (member, Some("worker-1")));
    assert_eq!(
        (it.claims.len(), it.session_timeout),
        (2, Duration::from_secs(10))
    );
    assert_eq!(described.listing.assignor.unwrap().to_string(), "sticky 1");
    assert_eq!(
        (
            described.claims.len(),
            described.offsets[0].metadata.as_str()
        ),
        (2, "m")
    );
    let lags = groups.lag("g").await.unwrap();
    let told: Vec<_> = lags
        .iter()
        .map(|it| (it.committed, it.lag, it.member))
        .collect();
    assert_eq!(
        told,
        [
            (Some(50), Some(50), Some(member)),
            (None, None, Some(member))
        ]
    );
    assert!(lags.iter().all(|lag| lag.bounds == Some(BOUNDS)));
    // What retention took away is not to be read any more.
    fake.change(|state| state.partition(0).log_start = 80);
    assert_eq!(groups.lag("g").await.unwrap()[0].lag, Some(20));
}

#[tokio::test]
async fn lag_of_a_topic_that_is_gone_hides_no_other() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    fake.change(|state| {
        let (_, partitions) = state.topics.remove(TOPIC).unwrap();
        let again = (qute_client::TopicId::random(), partitions);
        state.topics.insert(TOPIC.to_owned(), again);
        state.cluster_index += 1;
    });
    let client = fake.client().await;
    client.groups().commit("g", [at(1, 60)]).await.unwrap();
    let lags = client.groups().lag("g").await.unwrap();
    let (gone, there): (Vec<_>, Vec<_>) = lags.iter().partition(|it| it.partition.topic.is_none());
    assert_eq!((gone[0].committed, gone[0].lag), (Some(50), None));
    assert_eq!((there[0].committed, there[0].lag), (Some(60), Some(40)));
}

/// From, to, clamped.
fn moved(moves: &[OffsetMove]) -> Vec<(Option<u64>, Option<u64>, bool)> {
    moves
        .iter()
        .map(|it| (it.from, it.to, it.clamped))
        .collect()
}

#[tokio::test]
async fn reset_shows_what_it_would_do_and_does_nothing_before_it_is_told_to() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    let plan = async |plan| groups.reset("g", plan).await.unwrap();
    let one = (Some(50), Some(10), false);
    let all = plan(ResetPlan::new(ResetTo::Start)).await;
    assert_eq!(moved(all.moves()), [one]);
    let topic = plan(ResetPlan::new(ResetTo::Start).topic(TOPIC)).await;
    assert_eq!(moved(topic.moves()), [one, (None, Some(10), false)]);
    let partition = plan(ResetPlan::new(ResetTo::End).partition(TOPIC, 1)).await;
    assert_eq!(moved(partition.moves()), [(None, Some(100), false)]);
    for (to, reached, clamped) in [
        (ResetTo::Offset(70), 70, false),
        (ResetTo::Offset(5), 10, true),
        (ResetTo::Offset(500), 100, true),
        (ResetTo::Shift(-7), 43, false),
        (ResetTo::Shift(-70), 10, true),
        (ResetTo::Shift(i64::MAX), 100, true),
        (ResetTo::Shift(i64::MIN), 10, true),
    ] {
        let planned = plan(ResetPlan::new(to.clone()).partition(TOPIC, 0)).await;
        let expected = [(Some(50), Some(reached), clamped)];
        assert_eq!(moved(planned.moves()), expected, "{to:?}");
    }
    let saved = BTreeMap::from([((TOPIC.to_owned(), 1), 42)]);
    let file = plan(ResetPlan::new(ResetTo::Offsets(saved))).await;
    assert_eq!(moved(file.moves()), [(None, Some(42), false)]);
    assert_eq!(
        (fake.committed("g", 0), fake.committed("g", 1)),
        (Some(50), None)
    );
    file.execute().await.unwrap();
    all.execute().await.unwrap();
    assert_eq!(
        (fake.committed("g", 0), fake.committed("g", 1)),
        (Some(10), Some(42))
    );
    let forget = plan(ResetPlan::new(ResetTo::Forget).topic(TOPIC)).await;
    assert_eq!(
        moved(forget.moves()),
        [(Some(10), None, false), (Some(42), None, false)]
    );
    forget.execute().await.unwrap();
    assert_eq!(groups.offsets("g").await.unwrap(), []);
}

#[tokio::test]
async fn reset_to_a_time_asks_the_leaders_for_it() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let producer = client.producer(Default::default()).unwrap();
    for time_ms in [1000, 2000, 3000] {
        fake.change(|state| state.clock_ms = time_ms);
        producer
            .send(qute_client::Record::to(TOPIC).value("x"))
            .await
            .unwrap();
    }
    let groups = client.groups();
    groups.commit("g", [at(0, 3)]).await.unwrap();
    let to = async |time_ms| {
        let plan = ResetPlan::new(ResetTo::TimeMs(time_ms));
        moved(groups.reset("g", plan).await.unwrap().moves())[0].1
    };
    assert_eq!((to(1500).await, to(9000).await), (Some(1), Some(3)));
}

#[tokio::test]
async fn reset_under_live_claims_takes_force_and_gives_them_new_epochs() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    let member = join(&fake, "g");
    let planned = groups
        .reset("g", ResetPlan::new(ResetTo::End))
        .await
        .unwrap();
    assert_eq!(planned.moves()[0].member, Some(member));
    let error = planned.execute().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::GroupNotEmpty);
    assert_eq!(fake.committed("g", 0), Some(50));
    planned.force().execute().await.unwrap();
    assert_eq!(fake.committed("g", 0), Some(100));
    let claims = groups.describe("g").await.unwrap().claims;
    assert!(
        claims.iter().all(|claim| claim.claim_epoch == 2),
        "{claims:?}"
    );
}

#[tokio::test]
async fn reset_of_what_is_not_there_is_refused() {
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    let start = || ResetPlan::new(ResetTo::Start);
    let kind = async |name, plan| groups.reset(name, plan).await.unwrap_err().kind();
    assert_eq!(kind("other", start()).await, ErrorKind::UnknownGroup);
    assert_eq!(
        kind("g", start().topic("no")).await,
        ErrorKind::UnknownTopic
    );
    assert_eq!(
        kind("g", start().partition(TOPIC, 9)).await,
        ErrorKind::UnknownPartition
    );
    let nothing = ResetPlan::new(ResetTo::Shift(1)).partition(TOPIC, 1);
    assert_eq!(kind("g", nothing).await, ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn calls_may_be_made_from_any_task() {
    fn sent(_: impl Future + Send) {}
    let fake = fake(1).await;
    let groups = fake.client().await.groups();
    groups.commit("g", [at(0, 50)]).await.unwrap();
    let planned = groups
        .reset("g", ResetPlan::new(ResetTo::End))
        .await
        .unwrap();
    sent(groups.list());
    sent(groups.describe("g"));
    sent(groups.offsets("g"));
    sent(groups.lag("g"));
    sent(groups.delete("g"));
    sent(groups.commit("g", [at(0, 50)]));
    sent(groups.commit_unchecked("g", [at(0, 50)]));
    sent(groups.reset("g", ResetPlan::new(ResetTo::End)));
    sent(planned.execute());
}
