//! Follows submitted requests to their end: the events of all prompts of one call, as one answer.

use std::task::Poll;

use penstock_base::{CancelCause, Generation, Outcome};
use penstock_engine::{DeliveredToken, EventStream, RequestEvent};
use penstock_sched::message::Usage;

use super::error::ApiError;
use super::shape::{Choice, Envelope};

/// One call's events, numbered over its prompts: answer `i` of prompt `p` is choice `p * n + i`.
pub struct Answer {
    /// What its chunks share.
    pub envelope: Envelope,
    /// Text that stands before each choice's own, for `echo`.
    pub echoes: Vec<String>,
    n: usize,
    streams: Vec<Option<EventStream>>,
    /// Streams that have ended and whose client may not have everything yet: they count in the engine's bounds until they are dropped.
    ended: Vec<EventStream>,
    /// Where polling starts: streams take turns.
    turn: usize,
    usage: Usage,
    fault: Option<ApiError>,
    generation: Option<Generation>,
    degraded: bool,
}

/// What happened next.
#[derive(Debug)]
pub enum Part {
    /// More of one choice.
    Text {
        /// Which.
        choice: usize,
        /// What to append.
        text: String,
        /// Its tokens.
        tokens: Vec<DeliveredToken>,
    },
    /// One choice is complete.
    ChoiceEnded {
        /// Which.
        choice: usize,
        /// How.
        outcome: Outcome,
    },
    /// Everything has ended.
    Ended,
}

impl Answer {
    /// Of these streams, one a prompt, with `n` answers each.
    pub fn new(envelope: Envelope, streams: Vec<EventStream>, n: u16, echoes: Vec<String>) -> Self {
        Self {
            envelope,
            echoes,
            n: usize::from(n),
            ended: Vec::with_capacity(streams.len()),
            streams: streams.into_iter().map(Some).collect(),
            turn: 0,
            usage: Usage::default(),
            fault: None,
            generation: None,
            degraded: false,
        }
    }

    /// The number of choices.
    pub fn choices(&self) -> usize {
        self.n * self.streams.len()
    }

    /// What was used, complete after [`Part::Ended`].
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The first fault of any prompt.
    pub fn fault(&self) -> Option<&ApiError> {
        self.fault.as_ref()
    }

    /// Policy generation that placed the first prompt.
    pub fn generation(&self) -> Option<Generation> {
        self.generation
    }

    /// Some output cap was lowered.
    pub fn degraded(&self) -> bool {
        self.degraded
    }

    /// The next part. After [`Part::Ended`] it is [`Part::Ended`] again.
    pub async fn next(&mut self) -> Part {
        loop {
            let Some((prompt, event)) = self.event().await else { return Part::Ended };
            match event {
                RequestEvent::Queued { degraded, .. } => self.degraded |= degraded,
                RequestEvent::Dispatched { generation } => self.generation = self.generation.or(Some(generation)),
                RequestEvent::Text { choice, text, tokens } => {
                    return Part::Text { choice: self.choice(prompt, choice), text, tokens };
                }
                RequestEvent::ChoiceEnded { choice, outcome, .. } => {
                    return Part::ChoiceEnded { choice: self.choice(prompt, choice), outcome };
                }
                RequestEvent::Ended { outcome, usage, retry_after_ms } => {
                    self.end(prompt, outcome, &usage, retry_after_ms);
                }
            }
        }
    }

    fn choice(&self, prompt: usize, choice: u16) -> usize {
        prompt * self.n + usize::from(choice)
    }

    fn end(&mut self, prompt: usize, outcome: Outcome, usage: &Usage, retry_after_ms: u32) {
        self.usage.prompt_tokens += usage.prompt_tokens;
        self.usage.cached_tokens += usage.cached_tokens;
        self.usage.output_tokens += usage.output_tokens;
        self.ended.extend(self.streams[prompt].take());
        let fault = ApiError::of_outcome(outcome, retry_after_ms);
        if self.fault.is_none() && fault.is_some() {
            // The call has failed: its other prompts would be computed for nobody.
            self.fault = fault;
            self.cancel(CancelCause::Client);
        }
    }

    /// The next event of any prompt that has not ended.
    async fn event(&mut self) -> Option<(usize, RequestEvent)> {
        std::future::poll_fn(|context| {
            let count = self.streams.len();
            let mut is_over = true;
            for step in 0..count {
                let at = (self.turn + step) % count;
                let Some(stream) = &mut self.streams[at] else { continue };
                match stream.poll_recv(context) {
                    Poll::Ready(Some(event)) => {
                        self.turn = at + 1;
                        return Poll::Ready(Some((at, event)));
                    }
                    Poll::Ready(None) => self.streams[at] = None,
                    Poll::Pending => is_over = false,
                }
            }
            if is_over { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    /// Ends what still runs.
    pub fn cancel(&self, cause: CancelCause) {
        self.streams.iter().flatten().for_each(|stream| stream.cancel(cause));
    }

    /// The terminal event is out.
    pub fn acknowledge(&mut self) {
        self.ended.iter_mut().for_each(EventStream::acknowledge);
    }

    /// The first bytes go out.
    pub fn mark_streaming(&mut self) {
        self.streams.iter_mut().flatten().for_each(|stream| stream.streaming());
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The first fault of any prompt.
    pub async fn collect(&mut self) -> Result<Vec<Choice>, ApiError> {
        let mut choices: Vec<Choice> = (0..self.choices()).map(|_| Choice::default()).collect();
        for (choice, echo) in choices.iter_mut().zip(&self.echoes) {
            choice.text.push_str(echo);
        }
        loop {
            match self.next().await {
                Part::Text { choice, text, tokens } => {
                    choices[choice].text.push_str(&text);
                    if self.envelope.logprobs {
                        choices[choice].tokens.extend(tokens);
                    }
                }
                Part::ChoiceEnded { choice, outcome } => choices[choice].outcome = Some(outcome),
                Part::Ended => break,
            }
        }
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(choices),
        }
    }
}
