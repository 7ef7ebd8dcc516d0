//! A digest of everything that a policy is told in one question: equal for equal inputs, at the machine that asks and in a replay.
//!
//! Four lanes, since one would wait for its own multiplication at each of thousands of cells. Tells equal from unequal; protects against
//! nobody.

use penstock_policy_api::{Call, Context, Matrix, OverloadQuestion, RequestRecord, RoutingQuestion};

/// See the module.
pub struct Told([u64; 4]);

impl Told {
    /// An admission question.
    pub fn admission(call: &Call, request: &RequestRecord, context: Context<'_>) -> u64 {
        Self::of(call).request(request).words(context.values).end()
    }

    /// A routing question.
    pub fn routing(call: &Call, asked: &RoutingQuestion<'_>) -> u64 {
        let told = Self::of(call).request(asked.request).words(&[asked.phase as u64]);
        told.words(asked.context.values).matrix(asked.replicas).end()
    }

    /// A question about rows: order, victims or eviction.
    pub fn rows(call: &Call, context: Context<'_>, rows: &Matrix) -> u64 {
        Self::of(call).words(context.values).matrix(rows).end()
    }

    /// An overload question.
    pub fn overload(call: &Call, asked: &OverloadQuestion<'_>) -> u64 {
        Self::of(call).words(asked.context.values).matrix(asked.classes).matrix(asked.replicas).end()
    }

    fn of(call: &Call) -> Self {
        let seeds = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];
        Self(seeds).words(&[call.number, call.now_us, call.seed])
    }

    fn request(self, request: &RequestRecord) -> Self {
        self.words(&[
            request.request_id.0,
            request.tenant_id,
            request.flow_id,
            request.session_id,
            u64::from(request.attempt) << 48 | u64::from(request.sequences) << 32 | u64::from(request.input_tokens),
            u64::from(request.max_output_tokens),
            request.deadline_us,
            request.class_rank.index() as u64,
        ])
    }

    fn matrix(mut self, matrix: &Matrix) -> Self {
        self = self.words(&[matrix.rows() as u64, matrix.names() as u64]);
        for name in 0..matrix.names() {
            self = self.words(matrix.column(name));
        }
        self
    }

    fn words(mut self, words: &[u64]) -> Self {
        let mut fours = words.chunks_exact(4);
        for four in &mut fours {
            for (lane, word) in self.0.iter_mut().zip(four) {
                *lane = mixed(*lane, *word);
            }
        }
        for (lane, word) in self.0.iter_mut().zip(fours.remainder()) {
            *lane = mixed(*lane, *word);
        }
        // Lists of different lengths differ.
        self.0[3] = mixed(self.0[3], words.len() as u64);
        self
    }

    fn end(self) -> u64 {
        self.0.into_iter().fold(0, mixed)
    }
}

fn mixed(lane: u64, word: u64) -> u64 {
    let product = u128::from(lane ^ word) * 0x9fb2_1c65_1e98_df25;
    (product as u64 ^ (product >> 64) as u64).wrapping_add(lane.rotate_left(23))
}
