//! Dead letters: a handler that can't read some orders has them set aside after three attempts; a second
//! group looks at what was set aside, corrects it and sends it back.
//!
//! ```sh
//! cargo run --example dead_letters
//! ```
//!
//! With `QUTE_BOOTSTRAP` it uses that cluster, else a broker of its own.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_client::group::{CommitMode, HandlerError, RunPolicy};
use qute_client::{Client, ConsumedRecord, DeadLetter, ProducerConfig, Record};
use qute_examples::{Playground, unused};
use tokio::sync::watch;

const ORDERS: usize = 200;
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<()> {
    let playground = Playground::open().await?;
    let client = &playground.client;
    let orders = playground.topic("orders", 3).await?;
    let failed = playground.topic("orders-failed", 1).await?;
    let producer = client.producer(ProducerConfig::default())?;
    for number in 0..ORDERS {
        // One in ten comes from a program that writes amounts with a comma.
        let separator = if number % 10 == 0 { ',' } else { '.' };
        let record = Record::to(orders.as_str()).key(format!("customer-{}", number % 7));
        producer
            .send(record.value(format!("{number}{separator}50")))
            .await?;
    }

    // Adds amounts up, in cents.
    let (sum, mut summed) = watch::channel(0);
    let billing = {
        let policy = RunPolicy::default()
            .attempts(3)
            .backoff(Duration::from_millis(5), Duration::from_millis(20))
            .dead_letters(DeadLetter::to(failed.as_str()), producer.clone());
        let charge = move |order: ConsumedRecord| {
            let cents = cents(&order);
            let charged = cents.map(|cents| sum.send_modify(|sum| *sum += cents));
            async move { charged }
        };
        let group = join(client, "billing", &orders).await?;
        tokio::spawn(group.run(policy, charge, ctrl_c()))
    };

    // Corrects what was set aside.
    let repairing = {
        let (back, producer) = (Arc::<str>::from(orders.as_str()), producer.clone());
        let repair = move |letter: ConsumedRecord| {
            let (back, producer) = (Arc::clone(&back), producer.clone());
            async move { repair(&letter, back, &producer).await }
        };
        let group = join(client, "repairs", &failed).await?;
        tokio::spawn(group.run(RunPolicy::default(), repair, ctrl_c()))
    };

    let expected: usize = (0..ORDERS).map(|number| number * 100 + 50).sum();
    let all = summed.wait_for(|sum| *sum >= expected);
    let sum = *tokio::time::timeout(PATIENCE, all)
        .await
        .context("orders are missing")??;
    ensure!(sum == expected, "{sum} cents are charged, not {expected}");
    println!("{ORDERS} orders, {sum} cents: each charged once");
    billing.abort();
    repairing.abort();
    playground.close().await;
    Ok(())
}

async fn join(
    client: &Client,
    name: &str,
    topic: &str,
) -> Result<qute_client::group::GroupConsumer> {
    let group = client.group(unused(name)).topics([topic]);
    let group = group.commit(CommitMode::every(Duration::from_millis(200)));
    Ok(group.join().await?)
}

async fn ctrl_c() {
    // Without signals it runs until it is aborted.
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn cents(order: &ConsumedRecord) -> Result<usize, HandlerError> {
    let amount = std::str::from_utf8(order.value.as_deref().unwrap_or_default())?;
    let (whole, cents) = amount.split_once('.').ok_or("an amount without a point")?;
    Ok(whole.parse::<usize>()? * 100 + cents.parse::<usize>()?)
}

async fn repair(
    letter: &ConsumedRecord,
    back: Arc<str>,
    producer: &qute_client::Producer,
) -> Result<(), HandlerError> {
    let origin = letter.dead_letter_origin().ok_or("no dead letter")?;
    let amount = std::str::from_utf8(letter.value.as_deref().unwrap_or_default())?;
    println!(
        "{}/{} offset {}: {amount:?} failed {} times: {}",
        origin.topic, origin.partition, origin.offset, origin.attempts, origin.error
    );
    let key = letter.key.clone().ok_or("an order without a customer")?;
    let corrected = Record::to(back).key(key).value(amount.replace(',', "."));
    producer.send(corrected).await?;
    Ok(())
}
