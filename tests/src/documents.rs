//! Keeps the documents true where a program can: every file that they name exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const PACKAGES: [&str; 9] = [
    "bench/",
    "broker/",
    "cli/",
    "client/",
    "docs/",
    "examples/",
    "load/",
    "proto/",
    "tests/",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in [
        root().to_path_buf(),
        root().join("docs"),
        root().join("docs/adr"),
    ] {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|ext| ext == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// Targets of links, relative to the document, without anchors.
fn links(text: &str) -> Vec<&str> {
    let targets = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .filter_map(|target| target.split('#').next())
        .collect()
}

/// Code spans that read as paths of this repository, relative to its root.
fn paths(text: &str) -> Vec<&str> {
    let path_like = |span: &&str| {
        PACKAGES.iter().any(|package| span.starts_with(package))
            && span
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
    };
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(path_like)
        .collect()
}

#[test]
fn documents_name_only_files_that_exist() {
    let mut missing = Vec::new();
    let documents = documents();
    assert!(documents.iter().any(|path| path.ends_with("README.md")));
    for document in documents {
        let text = std::fs::read_to_string(&document).unwrap();
        let name = document.strip_prefix(root()).unwrap().display();
        let here = document.parent().unwrap();
        let linked = links(&text).into_iter().map(|link| (link, here.join(link)));
        let named = paths(&text)
            .into_iter()
            .map(|path| (path, root().join(path)));
        for (written, path) in linked.chain(named) {
            if !path.exists() {
                missing.push(format!("{name}: {written}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn scan_of_a_document_finds_links_and_paths() {
    let text =
        "[a](docs/A.md#b) [c](https://x.y) `tests/real/main.rs` `cargo test` `broker/src/x()`";
    assert_eq!(links(text), ["docs/A.md"]);
    assert_eq!(paths(text), ["tests/real/main.rs"]);
}

#[test]
fn metrics_page_lists_exactly_the_metrics_of_the_code() {
    let page = std::fs::read_to_string(root().join("docs/METRICS.md")).unwrap();
    let listed: BTreeSet<String> = page.lines().filter_map(listed_metric).collect();
    let mut used = BTreeSet::new();
    for package in ["broker", "client"] {
        let before = used.len();
        for file in crate::layers::rust_files(&root().join(package).join("src")) {
            let source = std::fs::read_to_string(file).unwrap();
            used.extend(source.split("\"qute_").skip(1).filter_map(used_metric));
        }
        assert!(used.len() > before, "{package}");
    }
    assert_eq!(listed, used);
}

/// The metric that a row of the page is about.
fn listed_metric(line: &str) -> Option<String> {
    let name = line.strip_prefix("| `")?.split('`').next()?;
    Some(name.to_owned())
}

/// The metric whose name goes on here, if it is one: small letters, and longer than a crate's.
fn used_metric(rest: &str) -> Option<String> {
    let name = rest.split('"').next()?;
    let plain = name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    (plain && name.contains('_')).then(|| format!("qute_{name}"))
}
