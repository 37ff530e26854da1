//! `qute topic`: settings, suggestions, what is said and what is printed.

use crate::{one, run};

#[tokio::test(flavor = "multi_thread")]
async fn unknown_topic_is_answered_with_the_one_that_may_have_been_meant() {
    let cluster = one().await;
    cluster.create_topic("orders", 1).await.unwrap();
    for args in [
        &["topic", "describe", "ordres"][..],
        &["topic", "delete", "ordres"],
        &["topic", "add-partitions", "ordres", "3"],
        &["topic", "config", "ordres"],
        &["topic", "alter", "ordres", "--unset", "cleanup"],
    ] {
        let said = run(&cluster, args).await.expect(1);
        let said = said.says("topic 'ordres' does not exist; did you mean 'orders'?");
        assert_eq!(said.text(), "", "{args:?}");
    }
    let said = run(&cluster, &["topic", "describe", "flights"])
        .await
        .expect(1);
    said.says("topic 'flights' does not exist")
        .says("qute topic list");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_altered_shown_and_put_back() {
    let cluster = one().await;
    cluster.create_topic("orders", 1).await.unwrap();
    let setting = async |args: &[&str]| {
        let args = [&["topic", "config", "orders"], args, &["--output", "json"]].concat();
        run(&cluster, &args).await.expect(0).json()[0].clone()
    };
    let before = setting(&["retention_ms"]).await;
    assert_eq!(
        (&before["source"], &before["value"]),
        (&"default".into(), &"604800000".into())
    );
    let set = setting(&["retention_ms=1h"]).await;
    assert_eq!(
        (&set["source"], &set["value"]),
        (&"topic".into(), &"3600000".into())
    );

    let alter =
        async |args: &[&str]| run(&cluster, &[&["topic", "alter", "orders"], args].concat()).await;
    let said = alter(&["--set", "segment_bytes=1MiB", "--unset", "retention_ms"])
        .await
        .expect(0);
    said.says("retention_ms is 604800000 (7days), its default")
        .says("segment_bytes is 1048576");
    let both = alter(&["--set", "cleanup=delete", "--unset", "cleanup"]).await;
    both.expect(2).says("both set and unset");
    let unknown = alter(&["--set", "retention=1h", "--set", "segment_bytes=2MiB"]).await;
    unknown
        .expect(1)
        .says("did you mean")
        .says("nothing was changed");
    assert_eq!(setting(&["segment_bytes"]).await["value"], "1048576");
    let unknown = run(&cluster, &["topic", "config", "orders", "retention"]).await;
    unknown.expect(1).says("did you mean 'retention_ms'?");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_name_the_context_that_they_were_made_in() {
    let cluster = one().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("contexts.toml");
    let in_context = async |args: &[&str]| {
        let mut command = crate::qute(&cluster, args);
        command
            .env_remove("QUTE_BOOTSTRAP")
            .env("QUTE_CONFIG", &file);
        crate::finish(command.spawn().unwrap()).await
    };
    let brokers = cluster.bootstrap();
    in_context(&["context", "add", "here", &brokers])
        .await
        .expect(0);
    in_context(&["topic", "create", "t"])
        .await
        .expect(0)
        .says("created topic t in context 'here'");
    let deleted = in_context(&["topic", "delete", "t", "--output", "json"])
        .await
        .expect(0);
    assert_eq!(deleted.json(), serde_json::json!({ "deleted": "t" }));
    cluster.stop().await;
}
