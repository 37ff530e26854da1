//! The statistics in the `metrics` facade.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

#[path = "scripted/fake/mod.rs"]
mod fake;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fake::{Fake, TOPIC};
use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use parking_lot::Mutex;
use qute_client::{Client, ClientConfig, ProducerConfig, Record};

/// Keeps counters and gauges by name.
#[derive(Default)]
struct Kept {
    values: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    described: Mutex<BTreeMap<String, String>>,
}

impl Kept {
    fn value(&self, name: &str) -> Arc<AtomicU64> {
        let mut values = self.values.lock();
        Arc::clone(values.entry(name.to_owned()).or_default())
    }

    fn describe(&self, name: &KeyName, meaning: SharedString) {
        let name = name.as_str().to_owned();
        self.described.lock().insert(name, meaning.to_string());
    }
}

/// Counts, whatever the value.
struct Count(Arc<AtomicU64>);

impl HistogramFn for Count {
    fn record(&self, _value: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Recorder for Kept {
    fn describe_counter(&self, name: KeyName, _unit: Option<Unit>, meaning: SharedString) {
        self.describe(&name, meaning);
    }

    fn describe_gauge(&self, name: KeyName, _unit: Option<Unit>, meaning: SharedString) {
        self.describe(&name, meaning);
    }

    fn describe_histogram(&self, name: KeyName, _unit: Option<Unit>, meaning: SharedString) {
        self.describe(&name, meaning);
    }

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key.name()))
    }

    fn register_gauge(&self, key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key.name()))
    }

    fn register_histogram(&self, key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Count(self.value(key.name()))))
    }
}

#[tokio::test]
async fn exported_metrics_are_the_statistics_of_all_clients() {
    let kept = Kept::default();
    let fake = Fake::start(1, 1).await;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let clients = metrics::with_local_recorder(&kept, || {
        [(); 2].map(|()| Client::lazy(config.clone()).unwrap())
    });
    for client in &clients {
        let producer = client.producer(ProducerConfig::default()).unwrap();
        let _ticket = producer
            .enqueue(Record::to(TOPIC).value("a"))
            .await
            .unwrap();
        // The facade keeps a float, as its bits.
        let gauge = kept.value("qute_client_buffer_bytes");
        let held = || f64::from_bits(gauge.load(Ordering::Relaxed));
        assert!(held() > 0.5);
        producer.flush().await;
        assert!(held().abs() < 0.5);
    }
    let sum = |of: fn(&Client) -> u64| clients.iter().map(of).sum::<u64>();
    for (name, told) in [
        ("records_sent_total", sum(|c| c.stats().records_sent)),
        ("bytes_sent_total", sum(|c| c.stats().bytes_sent)),
        ("records_acked_total", sum(|c| c.stats().records_acked)),
        ("ack_seconds", sum(|c| c.stats().ack_latency.count)),
        ("connections_failed_total", 0),
    ] {
        let exported = kept.value(&format!("qute_client_{name}"));
        assert_eq!(exported.load(Ordering::Relaxed), told, "{name}");
    }
    assert_eq!(sum(|c| c.stats().records_acked), 2);
    let described = kept.described.lock();
    let registered = kept.values.lock();
    assert!(described.keys().eq(registered.keys()), "each has a meaning");
    assert!(described.values().all(|meaning| meaning.ends_with('.')));
}
