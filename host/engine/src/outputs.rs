//! The output loop: tokens of all replicas in, events of all clients out.
//!
//! It is the only writer of every client's stream, so that order and the single end are decided in one place. It never waits for a
//! client. Replicas hear back from it where a stop string ended an answer and which blocks output has filled; the end of a request
//! passes through here on its way to the gateway, so that what is billed is what the client got.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use penstock_base::{CancelCause, Generation, Instant, Outcome, ReplicaEpoch, ReplicaId, RequestId, SeqId};
use penstock_exec::SampledToken;
use penstock_sched::message::{FromReplica, Usage};
use penstock_sched::replica::{FinishedTokens, ReplicaInput};

use crate::answer::{Answer, AnswerEnd, Progress};
use crate::config::Vocabulary;
use crate::context::RequestContext;
use crate::gateway_loop::{self, GatewayWake};
use crate::limits::{OUTPUT_WAKES_PER_REQUEST, TURNS_PER_REPLICA};
use crate::mailbox::Lane;
use crate::metrics::RequestEnd;
use crate::panics;
use crate::replica_wake::{self, FreezeCause, ReplicaWake};
use crate::request::RequestEvent;
use crate::stream::{Pushed, StreamWriter};
use crate::wiring::Wiring;

/// Requests that open, queue and end: a few for each permit.
pub(crate) const REQUESTS: Lane = Lane(0);
/// Placements: news that may be left out.
pub(crate) const NEWS: Lane = Lane(1);
/// Turns of replicas. A replica waits for room here.
pub(crate) const TURNS: Lane = Lane(2);

/// Bounds of the lanes.
pub(crate) fn lanes(requests_max: usize, replicas: usize) -> [usize; 3] {
    // A request's permit is held until its end has been handled here, so that the first lane cannot fill.
    [OUTPUT_WAKES_PER_REQUEST * requests_max + 1, requests_max, TURNS_PER_REPLICA * replicas]
}

/// Why the output loop wakes up.
pub(crate) enum OutputWake {
    /// A request was handed in.
    Open { context: Arc<RequestContext>, writer: StreamWriter },
    /// It entered the queue.
    Queued { request: RequestId, max_output_tokens: u32, degraded: bool },
    /// It was placed.
    Dispatched { request: RequestId, generation: Generation, at: Instant },
    /// It is over.
    Ended { request: RequestId, outcome: Outcome, usage: Usage, retry_after_ms: u32 },
    /// What one turn of a replica's loop brought.
    Turn(Turn),
    /// Nothing comes any more.
    Shutdown,
}

/// What one turn of a replica's loop brought, in order.
pub(crate) struct Turn {
    pub replica: ReplicaId,
    pub epoch: ReplicaEpoch,
    pub items: Vec<TurnItem>,
}

/// One thing of a turn.
#[derive(Debug)]
pub(crate) enum TurnItem {
    /// Tokens that count.
    Tokens { seq: SeqId, attempt: u16, first: u32, tokens: Vec<SampledToken> },
    /// The replica ended a sequence.
    SequenceEnded { seq: SeqId, attempt: u16, outcome: Outcome, tokens: u32 },
    /// The replica is done with a request; goes on to the gateway once what counts is settled.
    Ended { request: RequestId, settled: Option<Arc<AtomicU32>>, attempt: u16, outcome: Outcome, usage: Usage },
    /// This epoch of the replica is over; `lost` when the replica will not come back. Goes on to the gateway behind the ends before it.
    Down { lost: bool },
}

/// See the module.
pub(crate) struct OutputLoop {
    wiring: Arc<Wiring>,
    vocabulary: Arc<dyn Vocabulary>,
    block_size_tokens: u32,
    requests: HashMap<RequestId, Output>,
    /// Inputs for the replica whose turn is being handled.
    feedback: Vec<ReplicaInput>,
}

/// One request's output.
struct Output {
    context: Arc<RequestContext>,
    writer: StreamWriter,
    answers: Box<[Answer]>,
    /// Its last placement.
    placed_at: Option<Instant>,
    first_token_at: Option<Instant>,
    /// Its client was too slow.
    slow: bool,
    /// A cancel that the gateway has not been told of yet.
    owed: Option<CancelCause>,
}

impl OutputLoop {
    pub fn new(wiring: Arc<Wiring>, vocabulary: Arc<dyn Vocabulary>, block_size_tokens: u32) -> Self {
        Self { wiring, vocabulary, block_size_tokens, requests: HashMap::new(), feedback: Vec::new() }
    }

    /// Runs until shutdown. A panic ends every stream as an internal failure and marks the engine dead.
    pub fn run(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.serve())).is_err() {
            let at = panics::last_place();
            tracing::error!(at, "the output loop panicked: every open stream ends and the engine is dead");
            self.wiring.die();
        }
        self.wiring.outputs.close();
        let mut left = Vec::new();
        self.wiring.outputs.take_all(&mut left, None);
        // Dropping the streams' writers, here and in what is left, ends what is still open.
    }

    fn serve(&mut self) {
        let wiring = Arc::clone(&self.wiring);
        let mut wakes = Vec::new();
        loop {
            wiring.outputs.take_all(&mut wakes, None);
            if wakes.is_empty() {
                return;
            }
            for wake in wakes.drain(..) {
                match wake {
                    OutputWake::Open { context, writer } => self.open(context, writer),
                    OutputWake::Queued { request, max_output_tokens, degraded } => {
                        if let Some(output) = self.requests.get(&request) {
                            output.writer.news(RequestEvent::Queued { max_output_tokens, degraded });
                        }
                    }
                    OutputWake::Dispatched { request, generation, at } => {
                        if let Some(output) = self.requests.get_mut(&request) {
                            output.placed_at = Some(at);
                            output.writer.news(RequestEvent::Dispatched { generation });
                        }
                    }
                    OutputWake::Ended { request, outcome, usage, retry_after_ms } => {
                        if let Some(output) = self.requests.remove(&request) {
                            output.end(&wiring, outcome, usage, retry_after_ms);
                        }
                    }
                    OutputWake::Turn(turn) => self.turn(turn),
                    OutputWake::Shutdown => return,
                }
            }
        }
    }

    fn open(&mut self, context: Arc<RequestContext>, writer: StreamWriter) {
        let answer = |params: &Arc<penstock_exec::SamplingParams>| {
            Answer::new(context.stops.clone(), params.min_tokens, context.chain.clone())
        };
        let answers = context.sampling.iter().map(answer).collect();
        let output =
            Output { writer, answers, placed_at: None, first_token_at: None, slow: false, owed: None, context };
        self.requests.insert(output.context.request(), output);
    }

    fn turn(&mut self, turn: Turn) {
        let (replica, epoch) = (turn.replica, turn.epoch);
        for item in turn.items {
            match item {
                TurnItem::Tokens { seq, attempt, first, tokens } => self.tokens(seq, attempt, first, tokens),
                TurnItem::SequenceEnded { seq, attempt, outcome, tokens } => {
                    self.sequence_ended(seq, attempt, AnswerEnd { outcome, tokens });
                }
                TurnItem::Ended { request, settled, attempt, outcome, usage } => {
                    let (outcome, usage) = match self.requests.get(&request) {
                        Some(output) => output.settled(outcome, usage),
                        // The client was told before, with what it had by then.
                        None => {
                            let output_tokens = settled.map_or(0, |settled| settled.load(Ordering::Acquire));
                            (outcome, Usage { output_tokens, ..usage })
                        }
                    };
                    let message = FromReplica::Ended { request, attempt, outcome, usage };
                    let wake = GatewayWake::Replica { replica, epoch, messages: vec![message] };
                    // Fails only when the gateway loop has ended; then every stream ends anyway.
                    let _ = self.wiring.gateway.push_waiting(gateway_loop::REPLICAS, wake);
                }
                TurnItem::Down { lost } => {
                    let wake = GatewayWake::ReplicaDown { replica, epoch, lost };
                    let _ = self.wiring.gateway.push_waiting(gateway_loop::CONTROL, wake);
                    if let Some(mailbox) = self.wiring.replica(replica) {
                        let _ = mailbox.try_push(replica_wake::FEEDBACK, ReplicaWake::Settled { epoch });
                    }
                }
            }
        }
        self.hand_back(replica, epoch);
    }

    /// Gives the replica what its turn led to.
    fn hand_back(&mut self, replica: ReplicaId, epoch: ReplicaEpoch) {
        if self.feedback.is_empty() {
            return;
        }
        let Some(mailbox) = self.wiring.replica(replica) else { return };
        let wake = ReplicaWake::Feedback { epoch, inputs: std::mem::take(&mut self.feedback) };
        if let Err(crate::mailbox::PushError::Full(_)) = mailbox.try_push(replica_wake::FEEDBACK, wake) {
            // Cannot happen while the replica loop takes everything that waits in each turn; if it does, its state is not to be trusted.
            let _ = mailbox
                .push_latest(replica_wake::FREEZE, ReplicaWake::Freeze { epoch, cause: FreezeCause::MailboxFull });
        }
    }

    fn tokens(&mut self, seq: SeqId, attempt: u16, first: u32, tokens: Vec<SampledToken>) {
        let metrics = &self.wiring.metrics;
        let count = tokens.len();
        let Some(output) = self.requests.get_mut(&seq.request) else { return metrics.discarded(count) };
        let Some(answer) = output.answers.get_mut(usize::from(seq.index)) else { return metrics.discarded(count) };
        if attempt < answer.attempt() {
            return metrics.discarded(count);
        }
        let begun = attempt == answer.attempt() || answer.begin_attempt(attempt, first, output.context.chain.clone());
        if !begun || first != answer.seen() {
            debug_assert!(false, "tokens of one attempt come in order and without gaps");
            tracing::error!(%seq, attempt, first, seen = answer.seen(), "tokens out of place: they are not used");
            return metrics.discarded(count);
        }
        let before = answer.ids().len();
        let progress = answer.push(tokens, self.block_size_tokens, self.vocabulary.as_ref());
        if self.wiring.keeps_output && output.context.manifest.sequences == 1 {
            output.context.keep_output(&answer.ids()[before..]);
        }
        metrics.discarded(progress.discarded);
        metrics.repeated(progress.repeated);
        if progress.diverged {
            metrics.diverged();
            tracing::error!(%seq, attempt, "repeated tokens differ: the executor is not row-invariant");
        }
        if let Some((first, keys)) = progress.keys.clone() {
            self.feedback.push(ReplicaInput::BlockKeys { seq, first, keys });
        }
        if let Some(end) = progress.tell_end {
            self.feedback.push(ReplicaInput::Finish(FinishedTokens { seq, tokens: end.tokens, outcome: end.outcome }));
        }
        output.hand_over(&self.wiring, seq.index, progress);
    }

    fn sequence_ended(&mut self, seq: SeqId, attempt: u16, end: AnswerEnd) {
        let Some(output) = self.requests.get_mut(&seq.request) else { return };
        let Some(answer) = output.answers.get_mut(usize::from(seq.index)) else { return };
        // An attempt that failed, or that was told to stop, may be followed by another one: only the gateway's end is the end then.
        if attempt < answer.attempt() || matches!(end.outcome, Outcome::Failed(_) | Outcome::Cancelled(_)) {
            return;
        }
        if let Some(progress) = answer.finish(end.outcome, Some(end.tokens)) {
            output.hand_over(&self.wiring, seq.index, progress);
        }
    }
}

impl Output {
    /// Puts progress of one answer into the client's stream.
    fn hand_over(&mut self, wiring: &Wiring, choice: u16, progress: Progress) {
        let answer = &mut self.answers[usize::from(choice)];
        let mut ended = progress.ended;
        if !progress.text.is_empty() || !progress.tokens.is_empty() {
            let count = progress.tokens.len();
            let pushed = self.writer.text(choice, progress.text, progress.tokens);
            if pushed == Pushed::Taken {
                self.measure(wiring, choice, count);
            } else {
                wiring.metrics.discarded(count);
                let cause = if pushed == Pushed::Abandoned { CancelCause::Client } else { CancelCause::SlowClient };
                answer.cut(Outcome::Cancelled(cause), count);
                ended = answer.end();
            }
            if pushed == Pushed::Overflowed {
                self.slow = true;
                self.owed = Some(CancelCause::SlowClient);
            }
        }
        self.insist(wiring);
        if let Some(end) = ended {
            let answer = &self.answers[usize::from(choice)];
            wiring.metrics.answer_ended(end.tokens, answer.last_at.since(answer.first_at.unwrap_or(answer.last_at)));
            self.writer.choice_ended(choice, end.outcome, end.tokens);
        }
    }

    /// Tells the gateway of a cancel that is owed to it: of a slow client, or what the reader wanted while there was no room for the news. What
    /// finds no room this time either is told with the next tokens.
    fn insist(&mut self, wiring: &Wiring) {
        if let Some(cause) = self.writer.take_owed_cancel() {
            self.owed.get_or_insert(cause);
        }
        if self.owed.is_some_and(|cause| wiring.cancel(self.context.request(), cause)) {
            self.owed = None;
        }
    }

    /// Measures tokens that are in the client's stream now.
    fn measure(&mut self, wiring: &Wiring, choice: u16, count: usize) {
        if count == 0 {
            return;
        }
        let now = wiring.clock.now();
        let metrics = &wiring.metrics;
        metrics.delivered(count);
        if self.first_token_at.is_none() {
            self.first_token_at = Some(now);
            let arrived = self.context.manifest.arrived;
            metrics.first_token(now.since(arrived), now.since(self.placed_at.unwrap_or(arrived)));
        }
        let answer = &mut self.answers[usize::from(choice)];
        match answer.first_at {
            Some(_) => metrics.next_tokens(count, now.since(answer.last_at)),
            None => answer.first_at = Some(now),
        }
        answer.last_at = now;
    }

    /// What a replica says of the end, corrected by what the client got.
    fn settled(&self, outcome: Outcome, usage: Usage) -> (Outcome, Usage) {
        let outcome = match (outcome.is_success(), self.answers.first().and_then(Answer::end)) {
            (true, _) if self.slow => Outcome::Cancelled(CancelCause::SlowClient),
            (true, Some(first)) => first.outcome,
            _ => outcome,
        };
        (outcome, Usage { output_tokens: self.output_tokens(), ..usage })
    }

    /// Output tokens that the client got: what counts of its answers, less what it left unread when it went.
    fn output_tokens(&self) -> u32 {
        let counted = self.answers.iter().map(Answer::counted_tokens).fold(0, u32::saturating_add);
        counted.saturating_sub(self.writer.left_unread())
    }

    /// Ends the client's stream.
    fn end(mut self, wiring: &Wiring, outcome: Outcome, usage: Usage, retry_after_ms: u32) {
        let outcome =
            if self.slow && outcome.is_success() { Outcome::Cancelled(CancelCause::SlowClient) } else { outcome };
        if !matches!(outcome, Outcome::Refused(_)) {
            for choice in 0..self.answers.len() as u16 {
                if let Some(progress) = self.answers[usize::from(choice)].finish(outcome, None) {
                    self.hand_over(wiring, choice, progress);
                }
            }
        }
        let now = wiring.clock.now();
        let manifest = &self.context.manifest;
        wiring.metrics.request_ended(&RequestEnd {
            outcome,
            since_arrival: now.since(manifest.arrived),
            placed_after: self.placed_at.map(|at| at.since(manifest.arrived)),
            decode: self.first_token_at.map(|at| now.since(at)),
            prompt_tokens: manifest.input_tokens,
        });
        wiring.metrics.discarded(self.writer.left_unread() as usize);
        let usage = Usage { output_tokens: self.output_tokens(), ..usage };
        tracing::debug!(
            request = manifest.request.0,
            ?outcome,
            input_tokens = manifest.input_tokens,
            output_tokens = usage.output_tokens,
            age_us = now.since(manifest.arrived).as_us(),
            "request ended"
        );
        self.context.settle_tokens(usage.output_tokens);
        self.writer.end(outcome, usage, retry_after_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig;
    use penstock_base::GatewayEpoch;
    use std::borrow::Cow;

    struct Letters;

    impl Vocabulary for Letters {
        fn token_bytes(&self, _: u32) -> Cow<'_, [u8]> {
            Cow::Borrowed(b"x")
        }
    }

    /// An output loop with one open request, and its reader.
    fn opened(wiring: &Arc<Wiring>) -> (OutputLoop, SeqId, Arc<RequestContext>, crate::stream::EventStream) {
        let mut outputs = OutputLoop::new(Arc::clone(wiring), Arc::new(Letters), 16);
        let (context, writer, reader) = rig::request(wiring, 1);
        outputs.open(Arc::clone(&context), writer);
        (outputs, SeqId { request: context.request(), index: 0 }, context, reader)
    }

    fn tokens(outputs: &mut OutputLoop, seq: SeqId, first: u32, count: u32) {
        let token = |id| SampledToken { id, logprob: 0.0, top: Vec::new() };
        outputs.tokens(seq, 1, first, (first..first + count).map(token).collect());
    }

    /// Cancels that lie at the gateway.
    fn cancels(wiring: &Wiring) -> Vec<(RequestId, CancelCause)> {
        let mut wakes = Vec::new();
        wiring.gateway.take_all(&mut wakes, Some(std::time::Instant::now()));
        let cancel = |wake: &GatewayWake| match wake {
            GatewayWake::Cancel { request, cause } => Some((*request, *cause)),
            _ => None,
        };
        wakes.iter().filter_map(cancel).collect()
    }

    #[test]
    fn what_a_client_that_leaves_had_not_read_is_not_billed() {
        let wiring = rig::wiring(4);
        let (mut outputs, seq, context, mut reader) = opened(&wiring);
        tokens(&mut outputs, seq, 0, 3);
        let read = reader.try_recv();
        assert!(matches!(read, Some(RequestEvent::Text { tokens, .. }) if tokens.len() == 3));
        tokens(&mut outputs, seq, 3, 4);
        drop(reader);
        tokens(&mut outputs, seq, 7, 2);
        // The gateway heard of the client first, and tells its end; the replica ends it later, with all that it delivered.
        let told = Usage { prompt_tokens: 10, output_tokens: 7, ..Usage::default() };
        let output = outputs.requests.remove(&seq.request).expect("it is open");
        let outcome = Outcome::Cancelled(CancelCause::Client);
        assert_eq!(output.settled(outcome, told).1.output_tokens, 3, "three were read");
        output.end(&wiring, outcome, told, 0);
        assert_eq!(context.settled().load(Ordering::Acquire), 3, "what the ledger is told when the replica is done");
        assert_eq!(rig::metric(&wiring, "vllm:generation_tokens_total"), 7.0, "handed to the stream, read or not");
        assert_eq!(rig::metric(&wiring, "penstock_discarded_tokens_total"), 6.0, "four unread and two behind");
    }

    #[test]
    fn a_cancel_that_found_no_room_is_told_again_with_the_next_tokens() {
        let wiring = rig::wiring(1);
        let (mut outputs, seq, _context, reader) = opened(&wiring);
        tokens(&mut outputs, seq, 0, 1);
        // Cancels of somebody else take the whole lane.
        let other = RequestId::new(GatewayEpoch(1), 99).expect("a small number");
        while wiring.cancel(other, CancelCause::Drain) {}
        drop(reader);
        tokens(&mut outputs, seq, 1, 1);
        assert!(cancels(&wiring).iter().all(|(request, _)| *request == other), "there was no room for it");
        tokens(&mut outputs, seq, 2, 1);
        assert_eq!(cancels(&wiring), [(seq.request, CancelCause::Client)]);
        tokens(&mut outputs, seq, 3, 1);
        assert_eq!(cancels(&wiring), [], "and once");
    }
}
