//! Ports that no other test holds.
//!
//! A broker is killed and comes back on the same port, so a port must stay ours while nothing
//! listens on it. Ports are taken below the range from which the kernel picks ports of outgoing
//! connections, and each is held by a locked file: other threads and other test processes of this
//! machine pass it by.

use std::fs::{File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};

const FIRST: u16 = 17_000;
const LAST: u16 = 31_000;

/// One port of loopback, TCP and UDP, held until dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    /// Keeps the lock.
    _lock: File,
}

impl Port {
    /// Takes a free port.
    ///
    /// # Errors
    /// When there is none, or the lock files can't be made.
    pub fn take() -> io::Result<Self> {
        let dir = std::env::temp_dir().join("qute-test-ports");
        std::fs::create_dir_all(&dir)?;
        let span = LAST - FIRST;
        let start = rand::random_range(0..span);
        for step in 0..span {
            let number = FIRST + (start + step) % span;
            let lock = File::create(dir.join(number.to_string()))?;
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok()
                && UdpSocket::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
            if free {
                return Ok(Self {
                    number,
                    _lock: lock,
                });
            }
        }
        let none = format!("no free port between {FIRST} and {LAST}");
        Err(io::Error::new(io::ErrorKind::AddrInUse, none))
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:number`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_taken_twice_differs() {
        let one = Port::take().unwrap();
        let two = Port::take().unwrap();
        assert_ne!(one.number(), two.number());
    }
}
