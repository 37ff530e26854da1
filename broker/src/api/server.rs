//! How this broker's gRPC listener is set up: the same for clients and for brokers.

use std::time::Duration;

use tonic::transport::Server;

/// Largest HTTP/2 frame, both ways: the setting that bounds throughput of large batches.
pub const FRAME_BYTES_MAX: u32 = 256 * 1024;
/// Flow-control window of a stream.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// Flow-control window of a connection.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Largest gRPC message: a batch of 4 MiB and what travels around it.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// A peer that is silent this long is asked for a sign of life.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// And is cut off if it gives none for this long.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A gRPC server with Qute's transport settings.
pub fn builder() -> Server {
    Server::builder()
        .max_frame_size(FRAME_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_adaptive_window(Some(false))
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
}
