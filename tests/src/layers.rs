//! Keeps the layers of `broker/src`: each may use only those below it.
//!
//! Reads the sources as text: `crate::name` and `crate::{a, b}` outside comments. Facts travel up
//! by channels and traits that the lower layer defines, so the text shows every dependency.

use std::path::{Path, PathBuf};

/// Rank of each layer; layers of equal rank don't know each other.
const RANKS: [(&str, u32); 9] = [
    ("env", 0),
    ("storage", 1),
    ("raft", 2),
    ("partition", 3),
    ("gossip", 3),
    ("controller", 4),
    ("groups", 5),
    ("api", 6),
    ("http", 6),
];

/// Modules above every layer.
const TOP: [&str; 4] = ["broker", "config", "lib", "main"];

fn rank(module: &str) -> Option<u32> {
    RANKS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|&(_, rank)| rank)
}

/// The first path segments after each `crate::` of a source text.
fn crate_uses(source: &str) -> Vec<String> {
    let code: String = source
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line))
        .collect::<Vec<_>>()
        .join("\n");
    let mut uses = Vec::new();
    for (at, found) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + found.len()..];
        match rest.strip_prefix('{') {
            Some(list) => uses.extend(top_names(list)),
            None => uses.push(identifier(rest)),
        }
    }
    uses
}

/// The first segments of the items of a brace list that has been opened.
fn top_names(list: &str) -> Vec<String> {
    let (mut depth, mut names, mut item) = (0_usize, Vec::new(), String::new());
    for c in list.chars() {
        match c {
            '}' if depth == 0 => break,
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(identifier(std::mem::take(&mut item).trim())),
            _ => {}
        }
        if !(c == ',' && depth == 0) {
            item.push(c);
        }
    }
    names.push(identifier(item.trim()));
    names.retain(|name| !name.is_empty());
    names
}

fn identifier(text: &str) -> String {
    text.chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect()
}

pub(crate) fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            files.push(path);
        }
    }
    files
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn broker_layer_uses_only_layers_below() {
    let src = root().join("broker/src");
    let mut faults = Vec::new();
    for file in rust_files(&src) {
        let relative = file.strip_prefix(&src).unwrap();
        let first = relative
            .components()
            .next()
            .unwrap()
            .as_os_str()
            .to_string_lossy();
        let module = first.trim_end_matches(".rs").to_owned();
        if TOP.contains(&module.as_str()) {
            continue;
        }
        let Some(own) = rank(&module) else {
            faults.push(format!("{} belongs to no layer", relative.display()));
            continue;
        };
        for used in crate_uses(&std::fs::read_to_string(&file).unwrap()) {
            let allowed = used == module || rank(&used).is_some_and(|rank| rank < own);
            if !allowed {
                faults.push(format!("{} uses crate::{used}", relative.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn layer_scan_finds_uses_in_every_form() {
    let source =
        "use crate::{storage::{Log, Store}, raft};\n// crate::api\nfn f(x: crate::http::X) {}";
    assert_eq!(crate_uses(source), ["storage", "raft", "http"]);
}

#[test]
fn client_and_proto_never_depend_on_the_broker() {
    for package in ["client", "proto"] {
        let manifest = std::fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        assert!(
            !manifest.contains("qute-broker"),
            "{package} depends on the broker"
        );
    }
}
