//! Whether a peer is who it says it is (S23), and of this cluster.
//!
//! A data directory that was copied, or rolled back to an older copy, gives two processes one
//! identity. Each start of a broker raises a boot counter that is synced before use, and each
//! process draws a random id. Peers remember the newest boot of each broker, and the process that
//! showed it:
//!
//! ```text
//!   boot older                                -> refused: rolled back or copied
//!   boot equal, another process               -> refused: copied
//!   boot newer, the known process still heard -> refused: copied (it would have a newer boot)
//!   boot newer, its line of processes does not lead back to the known one
//!                                             -> refused: rolled back or copied, then restarted
//!   boot newer otherwise                      -> a restart: remembered
//! ```

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::internal::PeerHello;
use qute_proto::v1;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The protocol between brokers that this one speaks.
pub const PROTOCOL_VERSION: u32 = 1;

/// A greeting lists at least this many earlier processes before it leaves any out.
const EARLIER_FULL: usize = 1023;

/// A process that was heard within this time is alive: another one with its identity is a copy.
const HEARD_WITHIN: Duration = Duration::from_secs(3);

/// Who this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The broker, as stored in its data directory.
    pub broker: BrokerId,
    /// Rises at each start, synced before use.
    pub boot: u64,
    /// Random per process.
    pub process: u64,
}

/// Why a peer was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The greeting is missing or makes no sense.
    #[error("no valid hello: {0}")]
    Malformed(&'static str),
    /// It speaks another protocol.
    #[error("protocol version {theirs}, this broker speaks {PROTOCOL_VERSION}")]
    ProtocolVersion {
        /// What it speaks.
        theirs: u32,
    },
    /// It belongs to another cluster.
    #[error("cluster {theirs} is not this broker's cluster {ours}")]
    WrongCluster {
        /// This broker's cluster.
        ours: ClusterId,
        /// The peer's.
        theirs: ClusterId,
    },
    /// One of the two is of no cluster yet. Retriable.
    #[error("not part of a cluster yet")]
    NotFormed,
    /// S23: another process showed the same identity, with this boot or a newer one.
    #[error(
        "broker {broker} at boot {boot} is not the one that is known (boot {known}): its data \
         directory was copied or rolled back; stop this process and start it on an empty one"
    )]
    Copied {
        /// The identity.
        broker: BrokerId,
        /// The refused boot.
        boot: u64,
        /// The boot that is known.
        known: u64,
    },
    /// S23: the process that showed the identity first is still alive. Retriable: it may be gone
    /// soon.
    #[error(
        "broker {broker} is alive in another process (boot {known}): if that is not the one being \
         replaced, the data directory was copied"
    )]
    InUse {
        /// The identity.
        broker: BrokerId,
        /// The boot of the process that is alive.
        known: u64,
    },
}

impl Refusal {
    /// True if this process can never be accepted under its identity.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Copied { .. } | Self::WrongCluster { .. } | Self::ProtocolVersion { .. }
        )
    }

    /// The error that travels.
    #[must_use]
    pub fn to_wire(&self) -> v1::Error {
        let code = match self {
            Self::WrongCluster { .. } => v1::ErrorCode::WrongCluster,
            Self::NotFormed | Self::InUse { .. } => v1::ErrorCode::NotReady,
            Self::Malformed(_) | Self::ProtocolVersion { .. } | Self::Copied { .. } => {
                v1::ErrorCode::InvalidArgument
            }
        };
        v1::Error {
            code: code.into(),
            message: self.to_string(),
            ..Default::default()
        }
    }
}

struct Known {
    boot: u64,
    // 0: only the boot is known (from `__cluster`).
    process: u64,
    heard: Instant,
    // Cancelled when another process takes over: its streams end.
    streams: CancellationToken,
}

/// The processes behind the identities of other brokers.
#[derive(Default)]
pub(super) struct KnownPeers {
    // Short: look-ups and inserts. Never held across an await.
    known: Mutex<HashMap<BrokerId, Known>>,
}

/// A peer that was let in.
#[derive(Clone, Debug)]
pub(super) struct Admitted {
    pub broker: BrokerId,
    /// Ends when another process takes over the identity.
    pub superseded: CancellationToken,
}

impl KnownPeers {
    /// Checks a greeting and remembers who it was.
    pub(super) fn admit(
        &self,
        own: Identity,
        cluster: Option<ClusterId>,
        hello: &PeerHello,
    ) -> Result<Admitted, Refusal> {
        let broker = check_cluster(own, cluster, hello)?;
        if broker == own.broker {
            if hello.process_id == own.process {
                return Ok(Admitted {
                    broker,
                    superseded: CancellationToken::new(),
                });
            }
            return Err(Refusal::Copied {
                broker,
                boot: hello.boot,
                known: own.boot,
            });
        }
        let now = Instant::now();
        let mut all = self.known.lock();
        let known = all.entry(broker).or_insert_with(|| Known {
            boot: hello.boot,
            process: hello.process_id,
            heard: now,
            streams: CancellationToken::new(),
        });
        if known.process == 0 && hello.boot >= known.boot {
            known.process = hello.process_id;
            known.boot = hello.boot;
        }
        if hello.process_id != known.process || hello.boot != known.boot {
            if hello.boot <= known.boot {
                return Err(Refusal::Copied {
                    broker,
                    boot: hello.boot,
                    known: known.boot,
                });
            }
            if !leads_back_to(hello, known) {
                return Err(Refusal::Copied {
                    broker,
                    boot: hello.boot,
                    known: known.boot,
                });
            }
            if now.duration_since(known.heard) < HEARD_WITHIN && !known.streams.is_cancelled() {
                return Err(Refusal::InUse {
                    broker,
                    known: known.boot,
                });
            }
            known.streams.cancel();
            known.streams = CancellationToken::new();
            known.boot = hello.boot;
            known.process = hello.process_id;
        }
        known.heard = now;
        Ok(Admitted {
            broker,
            superseded: known.streams.clone(),
        })
    }

    /// The admitted peer was heard: it is alive.
    pub(super) fn heard(&self, peer: &Admitted) {
        if let Some(known) = self.known.lock().get_mut(&peer.broker)
            && !peer.superseded.is_cancelled()
        {
            known.heard = Instant::now();
        }
    }

    /// The admitted peer's connection broke: its process is probably gone, so a newer one need not
    /// wait.
    pub(super) fn lost(&self, peer: &Admitted) {
        if let Some(known) = self.known.lock().get_mut(&peer.broker)
            && !peer.superseded.is_cancelled()
            && let Some(past) = Instant::now().checked_sub(HEARD_WITHIN)
        {
            known.heard = past;
        }
    }

    /// A boot and its process that the cluster's own records show.
    pub(super) fn remember(&self, broker: BrokerId, boot: u64, process: u64) {
        let now = Instant::now();
        let mut all = self.known.lock();
        let known = all.entry(broker).or_insert_with(|| Known {
            boot,
            process,
            heard: now.checked_sub(HEARD_WITHIN).unwrap_or(now),
            streams: CancellationToken::new(),
        });
        if boot > known.boot {
            // The cluster let in a newer process than this broker has met.
            known.streams.cancel();
            known.streams = CancellationToken::new();
            known.boot = boot;
            known.process = process;
            known.heard = now.checked_sub(HEARD_WITHIN).unwrap_or(now);
        }
    }
}

/// Whether the greeting's line of processes contains the known one at its boot. One that no longer
/// reaches back so far is believed.
fn leads_back_to(hello: &PeerHello, known: &Known) -> bool {
    let back = hello.boot.saturating_sub(known.boot).saturating_sub(1);
    let process = usize::try_from(back)
        .ok()
        .and_then(|back| hello.earlier_process_ids.get(back));
    match process {
        Some(process) => *process == known.process || known.process == 0,
        // Openings are counted from 1 and the newest are listed: a line that is too short is no
        // line of this directory.
        None => hello.earlier_process_ids.len() >= EARLIER_FULL,
    }
}

fn check_cluster(
    own: Identity,
    cluster: Option<ClusterId>,
    hello: &PeerHello,
) -> Result<BrokerId, Refusal> {
    debug_assert!(own.broker != BrokerId(0), "nobody greets");
    if hello.protocol_version != PROTOCOL_VERSION {
        return Err(Refusal::ProtocolVersion {
            theirs: hello.protocol_version,
        });
    }
    if hello.broker_id == 0 || hello.process_id == 0 {
        return Err(Refusal::Malformed("broker and process must be named"));
    }
    let theirs = if hello.cluster_id.is_empty() {
        None
    } else {
        Some(
            ClusterId::from_wire(&hello.cluster_id)
                .ok_or(Refusal::Malformed("cluster id is not 16 bytes"))?,
        )
    };
    match (cluster, theirs) {
        (Some(ours), Some(theirs)) if ours != theirs => Err(Refusal::WrongCluster { ours, theirs }),
        (Some(_), Some(_)) => Ok(BrokerId(hello.broker_id)),
        _ => Err(Refusal::NotFormed),
    }
}
