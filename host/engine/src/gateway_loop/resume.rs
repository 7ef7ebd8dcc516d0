//! How does a request with output behind it go on at another replica? Its output so far stands behind its prompt, and is computed like it.
//!
//! The machine moves requests and knows no tokens; so it is here that the dispatch of a later attempt becomes one of a longer prompt and a shorter answer. What follows is what
//! would have followed: a token depends on the tokens before it, the parameters, the seed and its index, and the executor is told which of the
//! tokens are prompt and which are output.

use std::sync::Arc;

use penstock_sched::message::Dispatch;

use crate::context::{Placement, RequestContext};

/// What the replica's driver gets for this dispatch, which is changed where output is behind it.
pub(super) fn placement(context: &Arc<RequestContext>, dispatch: &mut Dispatch) -> Placement {
    let mut resumed = if dispatch.attempt > 1 { context.kept_output() } else { Vec::new() };
    // The last token that may come is computed again where all of them are there: then the answer ends by itself.
    resumed.truncate(dispatch.max_output_tokens.saturating_sub(1) as usize);
    let tokens = resumed.len() as u32;
    if tokens > 0 {
        let manifest = Arc::make_mut(&mut dispatch.manifest);
        manifest.input_tokens += tokens;
        manifest.max_output_tokens = manifest.max_output_tokens.saturating_sub(tokens).max(1);
        if let Some(mut chain) = context.chain.clone() {
            let more = chain.extend(&resumed, &[]);
            manifest.keys = manifest.keys.iter().copied().chain(more).collect();
        }
        let left = |cap: u32| cap.saturating_sub(tokens).max(1);
        dispatch.max_output_tokens = left(dispatch.max_output_tokens);
        dispatch.reserve_output_tokens = left(dispatch.reserve_output_tokens);
        dispatch.expected_output_tokens = left(dispatch.expected_output_tokens);
    }
    Placement { context: Arc::clone(context), resumed: resumed.into() }
}
