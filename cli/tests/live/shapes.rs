//! What commands print, in every form, held against snapshots. Ids, addresses and the like are
//! masked. After a change on purpose: `INSTA_UPDATE=always cargo test -p qute-cli --test live shapes`.

use qute_test::Cluster;

use crate::{one, run, run_with};

/// What differs from run to run, and what stands in its place.
struct Masks(Vec<(String, &'static str)>);

impl Masks {
    async fn of(cluster: &Cluster, topics: &[&str]) -> Self {
        let mut masks = Vec::new();
        let mut mask = |value: &serde_json::Value, with| {
            masks.push((value.as_str().unwrap().to_owned(), with));
        };
        let json = ["--output", "json"];
        let info = run(cluster, &[&["cluster", "info"][..], &json].concat())
            .await
            .expect(0)
            .json();
        mask(&info["cluster_id"], "CLUSTER");
        let brokers = run(cluster, &[&["cluster", "brokers"][..], &json].concat())
            .await
            .expect(0)
            .json();
        for broker in brokers.as_array().unwrap() {
            mask(&broker["id"], "BROKER");
            mask(&broker["address"], "HOST:PORT");
            mask(&broker["name"], "NAME");
        }
        for topic in topics {
            let described = run(
                cluster,
                &[&["topic", "describe", topic][..], &json].concat(),
            )
            .await;
            mask(&described.expect(0).json()["id"], "TOPIC-ID");
        }
        Self(masks)
    }

    /// The text with masks, and columns apart by two spaces whatever was masked.
    fn put_on(&self, text: &str) -> String {
        let mut masked = text.to_owned();
        for (value, with) in &self.0 {
            masked = masked.replace(value, with);
        }
        let narrow = |line: &str| {
            let indent: String = line.chars().take_while(|c| *c == ' ').collect();
            let words = line
                .trim_start()
                .split("  ")
                .map(str::trim)
                .filter(|word| !word.is_empty());
            indent + &words.collect::<Vec<_>>().join("  ")
        };
        masked.lines().map(narrow).collect::<Vec<_>>().join("\n")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_the_short_commands_are_as_they_were() {
    let cluster = one().await;
    cluster.create_topic("orders", 2).await.unwrap();
    let altered = run(
        &cluster,
        &["topic", "alter", "orders", "--set", "retention_ms=2d"],
    )
    .await;
    altered.expect(0).says("retention_ms is 172800000 (2days)");
    run_with(&cluster, &["produce", "orders", "-k", "k"], b"a\nb\n")
        .await
        .expect(0);
    let masks = Masks::of(&cluster, &["orders"]).await;
    for command in [
        &["cluster", "info"][..],
        &["cluster", "brokers"],
        &["topic", "list"],
        &["topic", "describe", "orders"],
        &["topic", "config", "orders"],
        &["topic", "config", "orders", "cleanup"],
        &["context", "list"],
        &["partition-of", "k", "-n", "6"],
    ] {
        for form in ["table", "json", "jsonl", "raw"] {
            let output = run(&cluster, &[command, &["--output", form]].concat())
                .await
                .expect(0);
            let name = format!("{}-{form}", command.join("-"));
            insta::assert_snapshot!(name, masks.put_on(output.text()));
        }
    }
    cluster.stop().await;
}
