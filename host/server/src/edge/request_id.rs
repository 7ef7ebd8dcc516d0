//! Every answer carries `x-request-id`: the caller's own, the answer's, or a new one, so that refusals can be asked about as well.

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

/// Echoed to the client; never used as an id inside the host.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest one that is taken.
const BYTES_MAX: usize = 256;

/// Puts the header in place.
pub async fn attach(request: Request, next: Next) -> Response {
    let own = request.headers().get(REQUEST_ID).filter(|id| is_usable(id)).cloned();
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    match own {
        Some(own) => {
            headers.insert(REQUEST_ID, own);
        }
        None if !headers.contains_key(REQUEST_ID) => {
            let new = format!("req-{:016x}", crate::tenants::entropy());
            if let Ok(new) = HeaderValue::from_str(&new) {
                headers.insert(REQUEST_ID, new);
            }
        }
        None => {}
    }
    response
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=BYTES_MAX).contains(&id.len()) && id.to_str().is_ok()
}
