//! What the client costs before the network: the producer's path (partition, buffer, batch, seal,
//! acknowledgement, ticket) on one core, with a broker that is a task beside it; and the choice of a
//! partition by key.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::SinkExt;
use qute_client::bench_internals;
use qute_client::{Producer, ProducerConfig, Record, partition_of};
use serde_json::{Value, json};
use tikv_jemallocator::Jemalloc;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// jemalloc, with its allocations counted while a case of this module asks for it.
pub struct CountingAllocator;

fn count() {
    if COUNTING.load(Relaxed) {
        ALLOCATIONS.fetch_add(1, Relaxed);
    }
}

#[allow(
    unsafe_code,
    reason = "an allocator can't be written without; it only forwards"
)]
// SAFETY: every call is forwarded as it came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { Jemalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        unsafe { Jemalloc.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        unsafe { Jemalloc.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { Jemalloc.dealloc(pointer, layout) }
    }
}

const TOPIC: &str = "bench";
const KEYS: usize = 1024;
/// Tickets that are awaited together.
const WINDOW: usize = 10_000;

/// How a case hands its records over.
#[derive(Clone, Copy)]
enum Case {
    /// Keyed, tickets dropped.
    Keyed,
    Keyless,
    /// Keyed, every ticket awaited.
    Tickets,
    /// Keyed, through the sink.
    Sink,
}

/// Runs all cases; one JSON object.
///
/// # Errors
/// A record that was not delivered.
pub fn measure(records: u32, partitions: u32, record_bytes: usize) -> Result<Value> {
    let mut report = json!({
        "bench": "client",
        "records": records,
        "partitions": partitions,
        "record_bytes": record_bytes,
        "partition_of_key_ns": { "8": keyed_ns(8), "16": keyed_ns(16), "64": keyed_ns(64) },
    });
    for (name, case) in [
        ("keyed", Case::Keyed),
        ("keyless", Case::Keyless),
        ("tickets", Case::Tickets),
        ("sink", Case::Sink),
    ] {
        report[name] = path(case, records, partitions, record_bytes)?;
        eprintln!("{name}: {}", report[name]);
    }
    Ok(report)
}

fn path(case: Case, records: u32, partitions: u32, record_bytes: usize) -> Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let config = ProducerConfig::default();
        let (_client, producer) = bench_internals::producer(config, TOPIC, partitions)?;
        let mut source = Source::new(record_bytes, !matches!(case, Case::Keyless));
        // Queues, drivers and buffers are made once.
        write(&producer, case, &mut source, records / 10).await?;
        let before = producer.report().delivered;
        ALLOCATIONS.store(0, Relaxed);
        COUNTING.store(true, Relaxed);
        let (begun, cpu_begun) = (Instant::now(), on_cpu());
        write(&producer, case, &mut source, records).await?;
        let (elapsed, cpu_ended) = (begun.elapsed(), on_cpu());
        COUNTING.store(false, Relaxed);
        let allocations = ALLOCATIONS.load(Relaxed);
        let delivered = producer.report().delivered - before;
        ensure!(delivered == u64::from(records), "{delivered} delivered");
        let count = f64::from(records);
        #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
        let per_record = allocations as f64 / count;
        let cpu = cpu_begun.zip(cpu_ended).map(|(from, to)| to - from);
        Ok(json!({
            "records_per_second": (count / elapsed.as_secs_f64()).round(),
            "records_per_cpu_second": cpu.map(|cpu| (count / cpu.as_secs_f64()).round()),
            "cpu_ns_per_record": cpu.map(|cpu| (cpu.as_secs_f64() * 1e9 / count).round()),
            "allocations_per_record": (per_record * 1e4).round() / 1e4,
        }))
    })
}

/// Time that this thread has run, which a busy machine does not stretch; `None` where the system does
/// not tell.
fn on_cpu() -> Option<Duration> {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanos = told.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanos))
}

async fn write(producer: &Producer, case: Case, source: &mut Source, records: u32) -> Result<()> {
    match case {
        Case::Keyed | Case::Keyless => {
            for _ in 0..records {
                drop(producer.enqueue(source.next()).await?);
            }
            producer.flush().await;
        }
        Case::Tickets => {
            let mut tickets = Vec::with_capacity(WINDOW);
            for number in 1..=records {
                tickets.push(producer.enqueue(source.next()).await?);
                if tickets.len() == WINDOW || number == records {
                    for ticket in tickets.drain(..) {
                        ticket.await?;
                    }
                }
            }
        }
        Case::Sink => {
            let mut sink = producer.sink();
            for _ in 0..records {
                sink.feed(source.next()).await?;
            }
            sink.flush().await?;
        }
    }
    Ok(())
}

/// Gives records whose parts were made before: what a record allocates is the client's doing.
struct Source {
    topic: Arc<str>,
    keys: Vec<Bytes>,
    value: Bytes,
    keyed: bool,
    next: usize,
}

impl Source {
    fn new(record_bytes: usize, keyed: bool) -> Self {
        Self {
            topic: Arc::from(TOPIC),
            keys: (0..KEYS)
                .map(|key| Bytes::from(format!("key-{key:012}")))
                .collect(),
            value: Bytes::from(vec![b'x'; record_bytes]),
            keyed,
            next: 0,
        }
    }

    fn next(&mut self) -> Record {
        self.next += 1;
        let mut record = Record::to(Arc::clone(&self.topic)).value(self.value.clone());
        record.key = self.keyed.then(|| self.keys[self.next % KEYS].clone());
        record
    }
}

fn keyed_ns(key_bytes: usize) -> f64 {
    const ROUNDS: usize = 2_000;
    let keys: Vec<String> = (0..KEYS).map(|key| format!("{key:0key_bytes$}")).collect();
    let (begun, cpu_begun) = (Instant::now(), on_cpu());
    for _ in 0..ROUNDS {
        for key in &keys {
            black_box(partition_of(black_box(key.as_bytes()), 6));
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    let keys = (ROUNDS * KEYS) as f64;
    let cpu = cpu_begun.zip(on_cpu()).map(|(from, to)| to - from);
    let elapsed = cpu.unwrap_or_else(|| begun.elapsed());
    (elapsed.as_secs_f64() * 1e9 / keys * 100.0).round() / 100.0
}
