//! From parsed body, prompt and caller to submissions in the engine.

use std::sync::Arc;

use penstock_base::{Instant, Priority};
use penstock_engine::{EventStream, Submission, SubmitError};

use super::app::App;
use super::caller::Caller;
use super::error::ApiError;
use super::prompt::Prompt;
use super::sampling::Generation;

/// The output cap of each answer: as asked, or the default as far as the context allows.
///
/// # Errors
/// 400 when prompt and output cannot fit. Nothing is shortened silently.
pub fn output_cap(app: &App, prompt: &Prompt, asked: Option<u32>, default: u32) -> Result<u32, ApiError> {
    let input = prompt.ids.len() as u64;
    let context = u64::from(app.context_tokens_max);
    let room = context.saturating_sub(input);
    if room == 0 {
        return Err(ApiError::never_fits(format!("the prompt has {input} tokens, a sequence has at most {context}")));
    }
    match asked {
        None => Ok(u64::from(default).min(room) as u32),
        Some(asked) if u64::from(asked) <= room => Ok(asked),
        Some(asked) => Err(ApiError::never_fits(format!(
            "the prompt has {input} tokens and max_tokens asks for {asked}: together more than the {context} of a sequence"
        ))),
    }
}

/// Hands one prompt to the engine.
///
/// # Errors
/// 429 and 503 when it takes no more.
pub fn submit(
    app: &App,
    caller: &Caller,
    generation: &Generation,
    prompt: &Prompt,
    max_output_tokens: u32,
    arrived: Instant,
) -> Result<EventStream, ApiError> {
    let mut sampling = generation.sampling.clone();
    if !generation.ignore_eos {
        sampling.stop_tokens.extend_from_slice(app.model.tokenizer().ends());
    }
    let sign = if app.config.http.priority_lower_is_earlier { -1 } else { 1 };
    let submission = Submission {
        tenant: caller.tenant.id,
        terms: caller.tenant.terms,
        flow: caller.flow,
        session: caller.session,
        trust: caller.tenant.trust,
        class: caller.class,
        priority: Priority(generation.priority.saturating_mul(sign)),
        prompt: Arc::clone(&prompt.ids),
        sequences: generation.n,
        max_output_tokens,
        sampling: Arc::new(sampling),
        stop_strings: generation.stop_strings.clone().into(),
        arrived,
        deadline: caller.deadline(arrived),
        slo_ttft: caller.slo_ttft,
        slo_tpot: caller.slo_tpot,
        traits: generation.traits.with(caller.traits),
        retention: generation.retention,
        retry: app.refusals.is_recent(caller.tenant.id, &prompt.ids),
    };
    match app.engine.submit(submission) {
        Ok((ticket, events)) => {
            if let Some(name) = &caller.request_id {
                app.client_ids.remember(name, ticket.request);
            }
            Ok(events)
        }
        Err(fault) => Err(of_submit(fault)),
    }
}

fn of_submit(fault: SubmitError) -> ApiError {
    match fault {
        SubmitError::Busy => ApiError::edge_full("requests in flight or bytes of prompts"),
        SubmitError::Draining => ApiError::not_ready("draining", "the server is shutting down"),
        SubmitError::NotRunning => ApiError::not_ready("not_running", "the engine does not run"),
        SubmitError::Invalid(fault) => ApiError::malformed(fault.to_string()),
    }
}
