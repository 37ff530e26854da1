//! `qute top` where there is no terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use qute_test::Cluster;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use tokio::process::Child;

use crate::{one, qute, run, run_with, signal};

/// How long the view may take to show what it should, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal of 80 by 24 with `qute top` on it.
struct Screen {
    child: Child,
    terminal: File,
    /// The other end, to look at its settings.
    line: OwnedFd,
}

impl Screen {
    fn open(cluster: &Cluster) -> Self {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let line = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&line, size).unwrap();
        let end = || line.try_clone().unwrap();
        let child = qute(cluster, &["top", "--interval", "100ms"])
            .env("TERM", "xterm")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap();
        Self {
            child,
            terminal: File::from(terminal),
            line,
        }
    }

    fn is_raw(&self) -> bool {
        let settings = tcgetattr(&self.line).unwrap();
        !settings
            .local_modes
            .contains(rustix::termios::LocalModes::ICANON)
    }

    /// Reads until the text was drawn.
    async fn shows(self, text: &'static str) -> Self {
        tokio::task::spawn_blocking(move || {
            let mut screen = self;
            read_until(&mut screen.terminal, text);
            screen
        })
        .await
        .unwrap()
    }

    /// Waits for the end; the terminal is as it was.
    async fn ends_well(mut self) {
        // Somebody has to read what is drawn last.
        let mut terminal = self.terminal.try_clone().unwrap();
        let reading = std::thread::spawn(move || {
            read_until(&mut terminal, "\u{1b}[?1049l");
        });
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        assert_eq!(ended.unwrap().unwrap().code(), Some(0));
        reading.join().unwrap();
        assert!(!self.is_raw());
    }
}

fn read_until(terminal: &mut File, text: &str) {
    let (mut seen, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut ready = [PollFd::new(terminal, PollFlags::IN)];
        poll(
            &mut ready,
            Some(&Timespec::try_from(Duration::from_secs(1)).unwrap()),
        )
        .unwrap();
        let shown = String::from_utf8_lossy(&seen);
        assert!(Instant::now() < deadline, "no {text:?} in {shown:?}");
        if ready[0].revents().contains(PollFlags::IN) {
            let mut bytes = [0; 4096];
            let count = terminal.read(&mut bytes).unwrap();
            seen.extend_from_slice(&bytes[..count]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn top_on_a_terminal_takes_keys_and_leaves_it_as_it_was() {
    let cluster = one().await;
    cluster.create_topic("orders", 3).await.unwrap();
    let screen = Screen::open(&cluster).shows("\u{1b}[?1049h").await;
    let mut screen = screen.shows("orders").await;
    assert!(screen.is_raw());
    screen.terminal.write_all(b"r").unwrap();
    let mut screen = screen.shows("reversed").await;
    screen.terminal.write_all(b"q").unwrap();
    screen.ends_well().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn top_ended_by_a_signal_leaves_the_terminal_as_it_was() {
    let cluster = one().await;
    cluster.create_topic("orders", 3).await.unwrap();
    let screen = Screen::open(&cluster).shows("orders").await;
    signal(&screen.child, "TERM");
    screen.ends_well().await;
    cluster.stop().await;
}

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
