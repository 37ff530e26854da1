//! The HTTP side of a broker: `/healthz`, `/readyz` and `/metrics`.
//!
//! - `/healthz` answers 200 while the process works and no replica has stopped (S4); 503 with the
//!   reasons when it needs a restart.
//! - `/readyz` answers 200 when the broker belongs to a formed cluster, `__cluster` has a leader
//!   and every replica that should be open is; otherwise 503 with the reasons, one a line.
//! - `/metrics` is the Prometheus text format, see `docs/METRICS.md`.
//!
//! One task accepts, one task a connection answers and ends with the first; a connection that is
//! silent for [`IDLE_TIMEOUT`] is closed.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A request's header must arrive within this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// How often histograms are drained into their buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// What the endpoints report. Implemented by the broker.
pub trait Status: Send + Sync + 'static {
    /// Why the process can't go on; empty: it is healthy.
    fn faults(&self) -> Vec<String>;
    /// Why the broker isn't ready; empty: it is.
    fn waits(&self) -> Vec<String>;
    /// Sets the gauges that are read off at the time of a scrape.
    fn refresh_gauges(&self);
}

/// The process's metrics recorder. Brokers embedded in one process share it.
///
/// # Errors
/// Another recorder has been installed by the program that embeds the broker.
pub fn recorder() -> Result<PrometheusHandle, String> {
    static HANDLE: OnceLock<Result<PrometheusHandle, String>> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            PrometheusBuilder::new()
                .install_recorder()
                .map_err(|e| e.to_string())
        })
        .clone()
}

/// Serves until `stop` resolves.
pub async fn serve(
    listener: TcpListener,
    status: Arc<dyn Status>,
    metrics: Option<PrometheusHandle>,
    stop: impl Future<Output = ()>,
) {
    let mut connections = JoinSet::new();
    let mut upkeep = tokio::time::interval(UPKEEP_INTERVAL);
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = upkeep.tick() => {
                if let Some(handle) = &metrics {
                    handle.run_upkeep();
                }
            }
            // A panic was printed when it happened.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((socket, _)) = accepted else {
                    // Out of file descriptors, most likely: give others time to close.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let (status, metrics) = (Arc::clone(&status), metrics.clone());
                connections.spawn(async move {
                    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                        let response = respond(&request, status.as_ref(), metrics.as_ref());
                        async move { Ok::<_, Infallible>(response) }
                    });
                    let served = hyper::server::conn::http1::Builder::new()
                        .timer(TokioTimer::new())
                        .header_read_timeout(IDLE_TIMEOUT)
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                    if let Err(error) = served {
                        tracing::debug!(%error, "an HTTP connection ended");
                    }
                });
            }
        }
    }
}

fn respond<B>(
    request: &Request<B>,
    status: &dyn Status,
    metrics: Option<&PrometheusHandle>,
) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET is served here\n".into(),
        );
    }
    match request.uri().path() {
        "/healthz" => check(status.faults()),
        "/readyz" => check(status.waits()),
        "/metrics" => match metrics {
            Some(handle) => {
                status.refresh_gauges();
                text(StatusCode::OK, handle.render())
            }
            None => text(
                StatusCode::NOT_FOUND,
                "this process exports its metrics through a recorder of its own\n".into(),
            ),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "served here: /healthz /readyz /metrics\n".into(),
        ),
    }
}

fn check(reasons: Vec<String>) -> Response<Full<Bytes>> {
    if reasons.is_empty() {
        text(StatusCode::OK, "ok\n".into())
    } else {
        text(StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n")
    }
}

fn text(code: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = code;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(Vec<String>);

    impl Status for Fixed {
        fn faults(&self) -> Vec<String> {
            Vec::new()
        }
        fn waits(&self) -> Vec<String> {
            self.0.clone()
        }
        fn refresh_gauges(&self) {}
    }

    fn get(path: &str, status: &Fixed) -> StatusCode {
        let request = Request::builder().uri(path).body(()).unwrap();
        respond(&request, status, None).status()
    }

    #[test]
    fn readyz_while_waiting_is_503_and_healthz_is_200() {
        let waiting = Fixed(vec!["`__cluster` has no leader".into()]);
        assert_eq!(get("/readyz", &waiting), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(get("/healthz", &waiting), StatusCode::OK);
        assert_eq!(get("/readyz", &Fixed(vec![])), StatusCode::OK);
        assert_eq!(get("/elsewhere", &waiting), StatusCode::NOT_FOUND);
    }
}
