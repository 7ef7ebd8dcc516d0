//! Reads a request's body within its bounds: largest size, time, and bytes pending over all requests.
//!
//! A request that is refused before its body was read still has a body on the way: a small one is read and thrown away, so that the
//! connection can be used again.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderMap;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::app::App;
use super::caller::Caller;
use super::error::ApiError;
use super::fields::Fields;

/// What is thrown away for the sake of the connection: so many bytes, for so long.
const SKIPPED_BYTES_MAX: usize = 64 << 10;
const SKIPPED_FOR: Duration = Duration::from_secs(1);

/// A body and its share of the pending bytes, given back when dropped.
pub struct Held {
    /// The bytes.
    pub bytes: Bytes,
    _share: Option<OwnedSemaphorePermit>,
}

impl Held {
    /// The body as an object; a long one is parsed off the workers.
    ///
    /// # Errors
    /// 400 for what is not a JSON object.
    pub async fn fields(&self, app: &App) -> Result<Fields, ApiError> {
        let bytes = self.bytes.clone();
        app.apart(bytes.len(), move || Fields::parse(&bytes)).await
    }
}

/// A request that was let in: who calls, its place among the requests at once, its body.
pub struct Entered {
    /// Who calls.
    pub caller: Caller,
    /// Its place.
    pub slot: OwnedSemaphorePermit,
    /// Its body.
    pub held: Held,
}

/// Lets a request in: key and headers first, then a place, and only then its body is read.
///
/// # Errors
/// Those of [`Caller::of`] and [`App::slot`]; 413 past the largest size, 408 when it is too slow, 429 when too many bytes are pending.
pub async fn enter(app: &App, headers: &HeaderMap, body: Body) -> Result<Entered, ApiError> {
    let admitted = Caller::of(app, headers).and_then(|caller| Ok((caller, app.slot()?)));
    match admitted {
        Ok((caller, slot)) => Ok(Entered { caller, slot, held: read(app, body).await? }),
        Err(fault) => {
            skip(body).await;
            Err(fault)
        }
    }
}

/// Throws a small body away. What is left of a large or slow one closes the connection after the answer.
async fn skip(mut body: Body) {
    let read = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > SKIPPED_BYTES_MAX {
                break;
            }
        }
    };
    // Nothing depends on the rest.
    let _ = tokio::time::timeout(SKIPPED_FOR, read).await;
}

async fn read(app: &App, body: Body) -> Result<Held, ApiError> {
    let limit = Duration::from_millis(app.config.http.body_timeout_ms);
    let read = collect(body, app.config.http.body_bytes_max, &app.pending_bytes);
    tokio::time::timeout(limit, read).await.map_err(|_| ApiError::slow_upload())?
}

async fn collect(mut body: Body, bytes_max: usize, pending: &Arc<Semaphore>) -> Result<Held, ApiError> {
    let declared = axum::body::HttpBody::size_hint(&body).lower();
    if declared > bytes_max as u64 {
        return Err(ApiError::too_large(bytes_max));
    }
    let mut bytes = Vec::new();
    let mut share: Option<OwnedSemaphorePermit> = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::malformed("the body broke off"))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > bytes_max {
            return Err(ApiError::too_large(bytes_max));
        }
        let more = u32::try_from(data.len()).map_err(|_| ApiError::too_large(bytes_max))?;
        let more = Arc::clone(pending).try_acquire_many_owned(more);
        let more = more.map_err(|_| ApiError::edge_full("bytes being read (http.pending_bytes_max)"))?;
        match &mut share {
            Some(share) => share.merge(more),
            None => share = Some(more),
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Held { bytes: Bytes::from(bytes), _share: share })
}
