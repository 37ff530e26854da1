//! What people and networks send by mistake: a typed error, and the broker keeps serving others.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_proto::v1::ErrorCode;
use qute_tests::cluster::Cluster;
use qute_tests::http;

use crate::bins;
use crate::wire::{self, Raw};

/// A record makes it through, written and read by others.
fn serves(cluster: &Cluster, topic: &str) -> Result<()> {
    cluster
        .qute(["topic", "create", topic, "--partitions", "1"])
        .run()?
        .ok()?;
    cluster
        .qute(["produce", topic])
        .run_with(b"still here\n")?
        .ok()?;
    let output = cluster.qute(["consume", topic, "-e"]).run()?.ok()?;
    ensure!(output.text() == "still here\n", "{}", output.text());
    ensure!(http::get(&cluster.nodes[0].http(), "/readyz")?.status == 200);
    Ok(())
}

/// Names that must never become topics.
fn bad_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "",
        ".",
        "..",
        "../escape",
        "a/b",
        "/etc/passwd",
        "..\\x",
        "a b",
        "a\tb",
        "a\nb",
        "tëst",
        "täglich",
        "日本",
        "a\u{0}b",
        "a\u{202e}b",
        "%2e%2e",
        "__cluster",
        "__groups",
        "__mine",
        "*",
        "~",
        "$HOME",
        ";rm",
    ]
    .map(str::to_owned)
    .to_vec();
    names.push("x".repeat(250));
    names
}

#[test]
fn topic_name_against_the_rules_is_refused_by_the_broker() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let before = topic_dirs(&cluster)?;
    for name in bad_names() {
        let code = raw.create_topic(&name, 1)?.err();
        ensure!(
            code == Some(ErrorCode::InvalidTopicName),
            "{name:?}: {code:?}"
        );
    }
    ensure!(
        topic_dirs(&cluster)? == before,
        "a refused name touched a path"
    );
    for name in ["a", "A.b_c-9", &"x".repeat(249), "...", ".hidden"] {
        ensure!(raw.create_topic(name, 1)?.is_ok(), "{name:?} was refused");
    }
    serves(&cluster, "t")?;
    cluster.stop()
}

fn topic_dirs(cluster: &Cluster) -> Result<Vec<std::path::PathBuf>> {
    let dir = cluster.nodes[0].dir();
    let read = |dir: &std::path::Path| -> Result<Vec<std::path::PathBuf>> {
        Ok(std::fs::read_dir(dir)?
            .flatten()
            .map(|entry| entry.path())
            .collect())
    };
    let mut all = read(cluster.dir())?;
    all.extend(read(dir)?);
    all.extend(read(&dir.join("topics"))?);
    all.sort();
    Ok(all)
}

#[test]
fn topic_name_against_the_rules_fails_on_the_command_line() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    for name in bad_names().into_iter().filter(|name| !name.contains('\0')) {
        let output = cluster.qute(["topic", "create", "--", &name]).run()?;
        ensure!(
            matches!(output.code, Some(1 | 2)),
            "{name:?} gave {:?}",
            output.code
        );
        ensure!(
            !output.stderr.is_empty(),
            "{name:?} was refused without a word"
        );
    }
    // Unknown topics, and names that are in use.
    cluster
        .qute(["topic", "describe", "none"])
        .run()?
        .expect(1)?
        .says("none")?;
    cluster
        .qute(["consume", "none", "-e"])
        .run()?
        .expect(1)?
        .says("none")?;
    cluster
        .qute(["produce", "none"])
        .run_with(b"x\n")?
        .expect(1)?
        .says("none")?;
    cluster.qute(["topic", "create", "twice"]).run()?.ok()?;
    cluster
        .qute(["topic", "create", "twice"])
        .run()?
        .expect(1)?
        .says("exists")?;
    let even = ["topic", "create", "even", "--replicas", "2"];
    ensure!(
        matches!(cluster.qute(even).run()?.code, Some(1 | 2)),
        "two replicas were accepted"
    );
    cluster
        .qute(["topic", "create", "wide", "--replicas", "3"])
        .run()?
        .expect(1)?;
    let unknown = ["topic", "create", "odd", "--config", "colour=red"];
    cluster.qute(unknown).run()?.expect(1)?.says("colour")?;
    let grow = |name, number| {
        cluster
            .qute(["topic", "add-partitions", name, number])
            .run()
    };
    grow("none", "9")?.expect(1)?.says("none")?;
    grow("twice", "2")?.expect(1)?.says("never lowered")?;
    grow("twice", "5000")?.expect(1)?.says("1 to 1024")?;
    grow("twice", "8")?.ok()?.says("twice has 8 partitions")?;
    cluster
        .qute(["consume", "twice", "-f", "%z"])
        .run()?
        .expect(2)?;
    cluster.qute(["no-such-command"]).run()?.expect(2)?;
    cluster.stop()
}

#[test]
fn absent_and_empty_keys_and_values_stay_apart() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic("t", 1, 1)?;
    // No key; empty key; empty key and value; key with an empty value; blank line.
    let input = b"plain\n:only value\n:\nkey:\n\nk:v:w\n";
    cluster
        .qute(["produce", "t", "-K", ":"])
        .run_with(input)?
        .ok()?;
    let output = cluster
        .qute(["consume", "t", "-e", "--output", "jsonl"])
        .run()?
        .ok()?;
    let records = output
        .text()
        .lines()
        .map(serde_json::from_str::<serde_json::Value>)
        .collect::<Result<Vec<_>, _>>()?;
    let seen: Vec<(Option<&str>, Option<&str>)> = records
        .iter()
        .map(|r| (r["key"].as_str(), r["value"].as_str()))
        .collect();
    let wanted = [
        (None, Some("plain")),
        (Some(""), Some("only value")),
        (Some(""), Some("")),
        (Some("key"), Some("")),
        (None, Some("")),
        (Some("k"), Some("v:w")),
    ];
    ensure!(seen == wanted, "{}", output.text());

    let output = cluster
        .qute(["consume", "t", "-e", "-f", r"[%k|%v]\n"])
        .run()?
        .ok()?;
    let wanted = "[|plain]\n[|only value]\n[|]\n[key|]\n[|]\n[k|v:w]\n";
    ensure!(output.text() == wanted, "{}", output.text());
    cluster.stop()
}

#[test]
fn value_of_a_hundred_megabytes_is_refused() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic("t", 1, 1)?;
    let path = cluster.dir().join("large");
    std::fs::File::create(&path)?.set_len(100 << 20)?;
    let path = path.to_string_lossy();
    cluster
        .qute(["produce", "t", "--file", &path])
        .run()?
        .expect(1)?
        .says("large")?;

    // A line that long is refused with its number; what stands before it is written.
    let mut input = b"first\n".to_vec();
    input.resize(20 << 20, b'x');
    input.extend_from_slice(b"\nthird\n");
    let output = cluster.qute(["produce", "t"]).run_with(&input)?;
    ensure!(
        matches!(output.code, Some(1 | 4)),
        "{:?}: {}",
        output.code,
        output.stderr
    );
    output.says("line 2")?;
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn message_of_a_hundred_megabytes_ends_its_stream_only() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let topic = raw.create_topic("t", 1)?.ok().context("refused")?;
    raw.wait_leader(&topic)?;
    let outcome = raw.produce(&topic, vec![vec![0_u8; 100 << 20].into()]);
    ensure!(outcome.is_err(), "100 MB were taken: {outcome:?}");
    let good = wire::batch(&[b"fine"])?;
    ensure!(matches!(
        raw.produce(&topic, vec![good])?.as_slice(),
        [Ok(0)]
    ));
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn broken_batches_are_refused_one_by_one() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let topic = raw.create_topic("t", 1)?.ok().context("refused")?;
    raw.wait_leader(&topic)?;

    let good = wire::batch(&[b"one", b"two"])?;
    let mut batches = vec![good.clone(), Vec::new().into(), vec![0; 64].into()];
    for length in [1, 3, 63, 64, good.len() - 1] {
        batches.push(good.slice(..length));
    }
    for place in 0..good.len() {
        for bit in [0, 7] {
            let mut flipped = good.to_vec();
            flipped[place] ^= 1 << bit;
            batches.push(flipped.into());
        }
    }
    // A record count of four billion, lengths of four billion, no records: with a right checksum.
    for (field, value) in [
        (12, u32::MAX),
        (12, 0),
        (16, u32::MAX),
        (20, u32::MAX),
        (20, 0),
    ] {
        let mut lie = good.to_vec();
        lie[field..field + 4].copy_from_slice(&value.to_le_bytes());
        batches.push(wire::with_right_checksum(lie));
    }
    let mut longer = good.to_vec();
    longer.extend_from_slice(b"tail");
    batches.push(longer.into());
    batches.push(good);

    let outcomes = raw.produce(&topic, batches)?;
    let (last, broken) = outcomes.split_last().context("no answers")?;
    let (first, broken) = broken.split_first().context("no answers")?;
    ensure!(matches!(first, Ok(0)), "the first good batch: {first:?}");
    for (number, outcome) in broken.iter().enumerate() {
        let refused = [ErrorCode::CorruptBatch, ErrorCode::BatchTooLarge];
        let refused = outcome.as_ref().is_err_and(|code| refused.contains(code));
        ensure!(refused, "broken batch {number}: {outcome:?}");
    }
    // The stream stayed open, and nothing took an offset.
    ensure!(matches!(last, Ok(2)), "the last good batch: {last:?}");
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn produce_to_what_does_not_exist_is_refused() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let topic = raw.create_topic("t", 1)?.ok().context("refused")?;
    raw.wait_leader(&topic)?;
    let good = wire::batch(&[b"x"])?;
    for (topic_id, partition, wanted) in [
        (vec![9_u8; 16], 0, ErrorCode::UnknownTopic),
        (topic.to_vec(), 7, ErrorCode::UnknownPartition),
        (topic.to_vec(), u32::MAX, ErrorCode::UnknownPartition),
        (vec![1, 2, 3], 0, ErrorCode::InvalidArgument),
        (Vec::new(), 0, ErrorCode::InvalidArgument),
    ] {
        let outcome = raw.produce_to(topic_id.clone().into(), partition, vec![good.clone()])?;
        ensure!(
            outcome == [Err(wanted)],
            "{topic_id:?}/{partition}: {outcome:?}"
        );
    }
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn zip_bomb_is_stored_and_refused_by_its_reader() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let topic = raw.create_topic("t", 1)?.ok().context("refused")?;
    raw.wait_leader(&topic)?;
    // Brokers never decompress, so they take it; its header claims less than it holds.
    let bomb = wire::bomb(512 << 20, 1 << 20)?;
    ensure!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    ensure!(matches!(
        raw.produce(&topic, vec![bomb])?.as_slice(),
        [Ok(0)]
    ));
    // One that claims what no batch may hold goes no further than the door.
    let bomb = wire::bomb(512 << 20, 512 << 20)?;
    let outcome = raw.produce(&topic, vec![bomb])?;
    ensure!(outcome.iter().all(Result::is_err), "{outcome:?}");

    cluster.qute(["consume", "t", "-e"]).run()?.expect(1)?;
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn unknown_fields_are_ignored() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    raw.create_topic_with_unknown_fields("t")?;
    let output = cluster.qute(["topic", "list"]).run()?.ok()?;
    ensure!(output.text().contains('t'), "{}", output.text());
    serves(&cluster, "after")?;
    cluster.stop()
}

#[test]
fn garbage_on_every_port_disturbs_nobody() -> Result<()> {
    let cluster = Cluster::start(&bins(), 3)?;
    let noise: Vec<u8> = (0..65_536_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let tls_hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &noise[..500]].concat();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let messages: [&[u8]; 6] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &noise,
        &tls_hello,
        &[&preface[..], &noise[..1000]].concat(),
        &[&preface[..], &[0xff; 300]].concat(),
    ];
    for node in &cluster.nodes {
        for address in [node.address(), node.http()] {
            for message in messages {
                let mut stream = TcpStream::connect(&address)?;
                stream.set_read_timeout(Some(Duration::from_secs(1)))?;
                stream.set_write_timeout(Some(Duration::from_secs(1)))?;
                // The broker may hang up at any point; that is its good right.
                let _ = stream.write_all(message);
                let _ = stream.read(&mut [0; 1024]);
            }
        }
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        for size in [0, 1, 7, 100, 1400, 9000, 60_000] {
            for _ in 0..20 {
                socket.send_to(&noise[..size], node.address())?;
            }
        }
    }
    serves(&cluster, "t")?;
    for node in &cluster.nodes {
        ensure!(
            http::get(&node.http(), "/readyz")?.status == 200,
            "{} suffers",
            node.name()
        );
    }
    cluster.stop()
}

#[test]
fn port_in_use_is_fatal_and_named() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 1)?;
    for which in ["listen", "http"] {
        let node = &cluster.nodes[0];
        let taken = if which == "listen" {
            node.address()
        } else {
            node.http()
        };
        let place = cluster.add(None)?;
        let node = cluster.node(place)?;
        let dir = format!("--data-dir={}", node.dir().display());
        let free = if which == "listen" {
            node.http()
        } else {
            node.address()
        };
        let other = if which == "listen" { "http" } else { "listen" };
        node.set_only(&[
            &dir,
            &format!("--{which}={taken}"),
            &format!("--{other}={free}"),
        ]);
        cluster.start_one(place)?;
        let code = cluster.node(place)?.wait_end(qute_tests::wait::LONG)?;
        ensure!(code == Some(1), "{which}: ended with {code:?}");
        let log = cluster.nodes[place].log()?;
        ensure!(log.contains(&taken), "{which}: doesn't name {taken}: {log}");
        serves(&cluster, which)?;
    }
    cluster.stop()
}

#[test]
fn wrong_settings_are_usage_errors() -> Result<()> {
    for (extra, text) in [
        (vec!["--no-such-flag"], "no-such-flag"),
        (vec!["--listen=nowhere"], "port"),
        (vec!["--expect=3"], "seeds"),
        (vec!["--expect=three"], "three"),
        (vec!["--config=/does/not/exist.toml"], "exist.toml"),
    ] {
        let mut cluster = Cluster::prepare(&bins(), 1)?;
        cluster.node(0)?.set_only(&extra);
        cluster.start_one(0)?;
        let code = cluster.node(0)?.wait_end(qute_tests::wait::LONG)?;
        ensure!(code == Some(2), "{extra:?}: ended with {code:?}");
        let log = cluster.nodes[0].log()?;
        ensure!(log.contains(text), "{extra:?}: {log}");
        cluster.stop()?;
    }
    Ok(())
}
