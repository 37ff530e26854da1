//! `qute top` where there is no terminal.

use crate::{one, run, run_with};

#[tokio::test(flavor = "multi_thread")]
async fn top_without_a_terminal_prints_one_picture() {
    let cluster = one().await;
    cluster.create_topic("orders", 3).await.unwrap();
    run_with(&cluster, &["produce", "orders"], b"a\nb\n")
        .await
        .expect(0);
    let picture = run(
        &cluster,
        &["top", "--interval", "100ms", "--output", "json"],
    )
    .await;
    let picture = picture.expect(0).json();
    assert_eq!(picture["topics"][0]["name"], "orders");
    assert_eq!(picture["topics"][0]["partitions"], 3);
    assert_eq!(picture["topics"][0]["records"], 2);
    assert_eq!(picture["topics"][0]["in_per_s"], 0.0);
    assert_eq!(picture["brokers"][0]["state"], "alive");
    assert_eq!(picture["brokers"][0]["leads"], 3);
    let text = run(&cluster, &["top", "--interval", "100ms"])
        .await
        .expect(0);
    assert!(text.text().starts_with("1 of 1 brokers alive"), "{text:?}");
    assert!(text.text().contains("\nTOPICS\nNAME"), "{text:?}");
    cluster.stop().await;
}
