//! A TCP proxy in front of a fake broker, for what only sockets can do: go away with all that is
//! open, for ever or for a while, or accept and keep silent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// A proxy; its listener and its connections end with [`Proxy::cut`] or when it is dropped.
pub struct Proxy {
    pub address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    shut: watch::Sender<bool>,
    task: AbortHandle,
}

impl Proxy {
    /// Listens on `127.0.0.1` and forwards to `target`; without a target it keeps silent.
    pub async fn start(target: Option<&str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = target.map(str::to_owned);
        let accepted = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&accepted);
        let shut = watch::Sender::new(false);
        let closed = shut.subscribe();
        let task = tokio::spawn(async move {
            // Dropped with this task, and all connections with it.
            let mut open = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::Relaxed);
                let target = target.clone();
                let mut closed = closed.clone();
                if *closed.borrow() {
                    continue;
                }
                let forward = async move {
                    let Some(target) = target else {
                        return std::future::pending().await;
                    };
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                };
                open.spawn(async move {
                    tokio::select! {
                        _ = closed.wait_for(|closed| *closed) => {}
                        () = forward => {}
                    }
                });
            }
        });
        Self {
            address,
            accepted,
            shut,
            task: task.abort_handle(),
        }
    }

    /// Closes what is open, and whatever comes until [`Proxy::open`].
    pub fn shut(&self) {
        self.shut.send_replace(true);
    }

    pub fn open(&self) {
        self.shut.send_replace(false);
    }

    /// How many connections were accepted.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Nothing listens any more, and what was open is closed.
    pub fn cut(&self) {
        self.task.abort();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}
