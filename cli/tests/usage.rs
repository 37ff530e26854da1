//! The `qute` binary where no broker runs: usage errors, exit codes, offline commands, and what
//! it says when nobody answers.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The binary, without anything that the environment of the test has to say about it.
fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qute"));
    command
        .env_remove("QUTE_BOOTSTRAP")
        .env_remove("QUTE_CONTEXT")
        .env("QUTE_CONFIG", "/nowhere/contexts.toml")
        .stdin(std::process::Stdio::null());
    command
}

fn qute(args: &[&str]) -> Output {
    binary().args(args).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn out(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn err(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

#[test]
fn help_and_version_go_to_stdout_and_exit_0() {
    for args in [&["--help"][..], &["help", "produce"], &["--version"]] {
        let output = qute(args);
        assert_eq!(code(&output), 0, "{args:?}");
        assert!(out(&output).contains("qute"), "{args:?}");
        assert_eq!(err(&output), "", "{args:?}");
    }
}

#[test]
fn usage_errors_exit_2_with_nothing_on_stdout() {
    for (args, says) in [
        (&[][..], "Usage"),
        (&["frobnicate"], "frobnicate"),
        (&["consume", "t", "-f", "%x"], "unknown verb `%x`"),
        (&["consume", "t", "-f", r"\q"], "unknown escape"),
        (&["consume", "t", "-o", "noon"], "@TIME"),
        (&["produce", "t", "-K", ""], "empty delimiter"),
        (&["topic", "create", "t", "--replicas", "2"], "odd number"),
        (&["topic", "add-partitions", "t"], "<N>"),
        (&["topic", "add-partitions", "t", "0"], "0 is not in 1.."),
        (&["topic", "list", "--timeout", "10"], "5s, 500ms or 7d"),
        (&["topic", "list", "-b", "nowhere:x"], "host:port"),
        (
            &["consume", "t", "--output", "json", "-f", "%v"],
            "--output json",
        ),
        (
            &["consume", "t", "--output", "jsonl", "-f", "%v"],
            "--output json",
        ),
    ] {
        let output = qute(args);
        assert_eq!(code(&output), 2, "{args:?}: {}", err(&output));
        assert_eq!(out(&output), "", "{args:?}");
        assert!(err(&output).contains(says), "{args:?}: {}", err(&output));
    }
}

#[test]
fn partition_of_prints_the_number_alone() {
    // Vectors of the design, modulo 6.
    for (key, partition) in [
        ("k1", 2_110_152_746u32 % 6),
        ("k2", 1_479_966_664 % 6),
        ("key1", 462_881_061 % 6),
        ("", 0),
    ] {
        let output = qute(&["partition-of", key, "-n", "6"]);
        assert_eq!(code(&output), 0);
        assert_eq!(out(&output), format!("{partition}\n"));
        assert_eq!(err(&output), "");
    }
}

#[test]
fn completion_prints_a_script() {
    let output = qute(&["completion", "bash"]);
    assert_eq!(code(&output), 0);
    assert!(out(&output).contains("partition-of"));
}

/// Two ports of loopback on which nobody listens.
fn dead_endpoints() -> [String; 2] {
    let sockets = [(), ()].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    sockets.map(|socket| socket.local_addr().unwrap().to_string())
}

#[test]
fn unreachable_brokers_are_named_within_the_deadline() {
    let [a, b] = dead_endpoints();
    let bootstrap = format!("{a},{b}");
    for (args, codes) in [
        (&["topic", "list"][..], &[1, 3][..]),
        (&["topic", "create", "t"], &[1, 3]),
        (&["topic", "describe", "t"], &[1, 3]),
        (&["topic", "delete", "t"], &[1, 3]),
        (&["topic", "add-partitions", "t", "8"], &[1, 3]),
        (&["consume", "t", "-e"], &[1, 3]),
        (&["produce", "t"], &[1, 3]),
        (&["cluster", "info"], &[1]),
        (&["cluster", "brokers"], &[1, 3]),
    ] {
        let started = Instant::now();
        let mut all = vec!["-b", &bootstrap, "--timeout", "1s"];
        all.extend_from_slice(args);
        let output = qute(&all);
        assert!(codes.contains(&code(&output)), "{args:?}: {output:?}");
        assert_eq!(out(&output), "", "{args:?}");
        for endpoint in [&a, &b] {
            assert!(
                err(&output).contains(endpoint.as_str()),
                "{args:?}: {}",
                err(&output)
            );
        }
        assert_eq!(
            err(&output).lines().count(),
            1,
            "{args:?}: {}",
            err(&output)
        );
        assert!(started.elapsed() < Duration::from_secs(5), "{args:?}");
    }
}

#[test]
fn silent_endpoint_is_named_when_the_deadline_passes() {
    // Takes connections (the kernel does) and never says a word.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = silent.local_addr().unwrap().to_string();
    for (args, exit) in [
        (&["topic", "list"][..], 3),
        (&["consume", "t", "-e"], 3),
        (&["produce", "t"], 3),
        (&["cluster", "info"], 1),
    ] {
        let mut all = vec!["-b", &endpoint, "--timeout", "500ms"];
        all.extend_from_slice(args);
        let output = qute(&all);
        assert_eq!(code(&output), exit, "{args:?}: {output:?}");
        assert!(err(&output).contains(&endpoint), "{}", err(&output));
    }
}

#[test]
fn bootstrap_comes_from_the_environment_unless_given() {
    let [a, b] = dead_endpoints();
    let run = |args: &[&str]| {
        binary()
            .args(args)
            .args(["--timeout", "500ms"])
            .env("QUTE_BOOTSTRAP", &a)
            .output()
            .unwrap()
    };
    assert!(err(&run(&["topic", "list"])).contains(&a));
    let given = run(&["topic", "list", "-b", &b]);
    assert!(err(&given).contains(&b) && !err(&given).contains(&a));
}

#[test]
fn contexts_are_saved_used_shown_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("qute").join("contexts.toml");
    let run = |args: &[&str]| {
        binary()
            .env("QUTE_CONFIG", &file)
            .args(args)
            .output()
            .unwrap()
    };
    let json = |args: &[&str]| -> serde_json::Value {
        let output = run(&[args, &["--output", "json"]].concat());
        assert_eq!(code(&output), 0, "{args:?}: {output:?}");
        serde_json::from_str(out(&output)).unwrap()
    };
    let [a, b] = dead_endpoints();
    assert_eq!(json(&["context", "show"])["source"], "default");
    assert_eq!(json(&["context", "add", "prod", &a])["current"], true);
    assert_eq!(json(&["context", "add", "dev", &b])["current"], false);
    let list = json(&["context", "list"]);
    assert_eq!(
        list,
        serde_json::json!([
            {"name": "dev", "bootstrap": [b], "current": false},
            {"name": "prod", "bootstrap": [a], "current": true},
        ])
    );
    // Commands go where it says, and name the context when nobody is there.
    let asked = run(&["topic", "list", "--timeout", "500ms"]);
    assert!(
        err(&asked).contains(&a) && err(&asked).contains("'prod'"),
        "{asked:?}"
    );
    let asked = run(&["topic", "list", "--timeout", "500ms", "--context", "dev"]);
    assert!(err(&asked).contains(&b), "{asked:?}");
    let shown = json(&["context", "show", "-b", "h:1"]);
    assert_eq!(
        (&shown["source"], &shown["name"]),
        (&"flag".into(), &serde_json::Value::Null)
    );

    let again = run(&["context", "add", "prod", &b]);
    assert_eq!(code(&again), 1);
    assert!(err(&again).contains("--replace"), "{again:?}");
    let unknown = run(&["context", "use", "prdo"]);
    assert_eq!(code(&unknown), 2);
    assert!(
        err(&unknown).contains("did you mean 'prod'?"),
        "{unknown:?}"
    );
    assert_eq!(code(&run(&["context", "remove", "prod"])), 0);
    assert_eq!(json(&["context", "show"])["source"], "default");

    std::fs::write(&file, "current = 5\n").unwrap();
    let broken = run(&["topic", "list"]);
    assert_eq!(code(&broken), 1);
    assert!(err(&broken).contains("line 1"), "{broken:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "current = 5\n");
}

#[test]
fn typing_errors_of_commands_and_flags_are_answered_with_suggestions() {
    for (args, says) in [
        (&["topci", "list"][..], "'topic'"),
        (&["topic", "lst"], "'list'"),
        (&["topic", "list", "--outptu", "json"], "'--output'"),
        (&["topic", "list", "--output", "jsno"], "'json'"),
        (&["completion", "bsh"], "'bash'"),
    ] {
        let output = qute(args);
        assert_eq!(code(&output), 2);
        assert!(err(&output).contains(says), "{args:?}: {}", err(&output));
    }
}

#[test]
fn bad_topic_names_are_refused_before_anything_connects() {
    for name in ["../etc", "caf\u{e9}", "__cluster", "a b", ""] {
        let output = qute(&["topic", "create", name]);
        assert_eq!(code(&output), 1, "{name}: {output:?}");
        assert!(err(&output).contains("topic name"), "{}", err(&output));
    }
}
