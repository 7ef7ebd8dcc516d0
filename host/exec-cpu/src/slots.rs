//! Slots: what the executor remembers of each sequence, and the check that a plan makes sense before any of it is applied.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_base::plan::{PlanOp, PlanRow, Task};
use penstock_base::{BlockRef, SeqId, Slot};
use penstock_exec::{SamplingParams, SlotOpening, Step};

use crate::sampling::SeenTokens;

/// One sequence.
#[derive(Debug)]
pub(crate) struct SlotState {
    pub(crate) seq: SeqId,
    /// Prompt, then generated tokens. Grows with each sampled one.
    pub(crate) tokens: Vec<u32>,
    /// How many of the tokens are prompt.
    pub(crate) prompt_len: usize,
    /// Physical blocks in order of position.
    pub(crate) table: Vec<u32>,
    pub(crate) params: Arc<SamplingParams>,
    /// Token counts, kept where a penalty needs them.
    pub(crate) seen: Option<SeenTokens>,
}

impl SlotState {
    fn open(opening: &SlotOpening) -> Self {
        let mut tokens = Vec::with_capacity(opening.prompt.len() + opening.generated.len() + 1);
        tokens.extend_from_slice(&opening.prompt);
        tokens.extend_from_slice(&opening.generated);
        Self {
            seq: opening.seq,
            tokens,
            prompt_len: opening.prompt.len(),
            table: Vec::new(),
            seen: SeenTokens::needed(&opening.params)
                .then(|| SeenTokens::from_history(&opening.prompt, &opening.generated)),
            params: Arc::clone(&opening.params),
        }
    }

    /// Appends a sampled token.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(seen) = &mut self.seen {
            seen.generated(token);
        }
    }

    /// Tokens generated so far: the index of the next one.
    pub(crate) fn generated_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
}

/// Bounds that a plan must respect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanLimits {
    pub(crate) block_tokens: usize,
    pub(crate) blocks: usize,
    pub(crate) slots: usize,
    pub(crate) step_tokens: usize,
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary: usize,
}

/// All slots of a replica.
#[derive(Debug, Default)]
pub(crate) struct SlotTable {
    slots: BTreeMap<u32, SlotState>,
}

/// What the check needs to know of a slot as it will be once the operations so far are applied.
#[derive(Clone, Copy)]
struct Outline {
    seq: SeqId,
    history: usize,
    table: usize,
}

impl SlotTable {
    pub(crate) fn get(&self, slot: Slot) -> Option<&SlotState> {
        self.slots.get(&slot.0)
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut SlotState> {
        self.slots.get_mut(&slot.0)
    }

    /// Says what is wrong with a step, if anything. Changes nothing.
    pub(crate) fn check(&self, step: &Step, limits: &PlanLimits) -> Result<(), String> {
        let mut changed: BTreeMap<u32, Option<Outline>> = BTreeMap::new();
        let mut openings = step.openings.iter();
        for op in &step.plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, seq } => {
                    let opening = openings.next().ok_or("an OpenSlot has no opening")?;
                    check_opening(opening, slot, seq, limits)?;
                    let history = opening.prompt.len() + opening.generated.len();
                    changed.insert(slot.0, Some(Outline { seq, history, table: 0 }));
                }
                PlanOp::SetBlock { slot, group, index, block } => {
                    check_block(block, limits)?;
                    let mut outline = self.outline(&changed, slot)?;
                    if group != 0 {
                        return Err(format!("kv group {group} does not exist"));
                    }
                    if index as usize > outline.table || index as usize >= limits.context_tokens {
                        return Err(format!("slot {slot}: table entry {index} after {} entries", outline.table));
                    }
                    outline.table = outline.table.max(index as usize + 1);
                    changed.insert(slot.0, Some(outline));
                }
                PlanOp::CopyBlock { from, to, tokens } => {
                    check_block(from, limits)?;
                    check_block(to, limits)?;
                    if tokens as usize > limits.block_tokens {
                        return Err(format!("copy of {tokens} tokens of a block of {}", limits.block_tokens));
                    }
                }
                // After a step that failed nobody knows which slots are open: dropping one that is not is fine.
                PlanOp::DropSlot { slot } => {
                    changed.insert(slot.0, None);
                }
            }
        }
        if openings.next().is_some() {
            return Err("more openings than OpenSlot operations".to_owned());
        }
        let mut used = BTreeSet::new();
        let mut query_tokens = 0usize;
        for row in &step.plan.rows {
            if !used.insert(row.slot) {
                return Err(format!("slot {} has two rows", row.slot));
            }
            check_row(row, self.outline(&changed, row.slot)?, limits)?;
            query_tokens += row.tokens as usize;
        }
        if query_tokens > limits.step_tokens {
            return Err(format!("{query_tokens} query tokens in a step of at most {}", limits.step_tokens));
        }
        Ok(())
    }

    fn outline(&self, changed: &BTreeMap<u32, Option<Outline>>, slot: Slot) -> Result<Outline, String> {
        let now = match changed.get(&slot.0) {
            Some(outline) => *outline,
            None => self.get(slot).map(|state| Outline {
                seq: state.seq,
                history: state.tokens.len(),
                table: state.table.len(),
            }),
        };
        now.ok_or_else(|| format!("slot {slot} is not open"))
    }

    /// Applies the operations of a checked step in order; `copy` copies one block over another.
    pub(crate) fn apply(&mut self, step: &Step, mut copy: impl FnMut(u32, u32)) {
        let mut openings = step.openings.iter();
        for op in &step.plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, .. } => {
                    if let Some(opening) = openings.next() {
                        self.slots.insert(slot.0, SlotState::open(opening));
                    }
                }
                PlanOp::SetBlock { slot, index, block, .. } => {
                    if let Some(state) = self.slots.get_mut(&slot.0) {
                        match state.table.get_mut(index as usize) {
                            Some(entry) => *entry = block.index,
                            None => state.table.push(block.index),
                        }
                    }
                }
                PlanOp::CopyBlock { from, to, .. } => copy(from.index, to.index),
                PlanOp::DropSlot { slot } => {
                    self.slots.remove(&slot.0);
                }
            }
        }
    }
}

fn check_block(block: BlockRef, limits: &PlanLimits) -> Result<(), String> {
    if (block.index as usize) < limits.blocks {
        return Ok(());
    }
    Err(format!("block {} of a pool of {}", block.index, limits.blocks))
}

fn check_opening(opening: &SlotOpening, slot: Slot, seq: SeqId, limits: &PlanLimits) -> Result<(), String> {
    if (opening.slot, opening.seq) != (slot, seq) {
        return Err(format!("the opening of slot {slot} is for slot {} of {}", opening.slot, opening.seq));
    }
    if slot.0 as usize >= limits.slots {
        return Err(format!("slot {slot} of {}", limits.slots));
    }
    let history = opening.prompt.len() + opening.generated.len();
    if history > limits.context_tokens {
        return Err(format!("slot {slot}: a history of {history} tokens, at most {}", limits.context_tokens));
    }
    let mut tokens = opening.prompt.iter().chain(&opening.generated);
    match tokens.find(|&&token| token as usize >= limits.vocabulary) {
        Some(token) => Err(format!("slot {slot}: token {token} of a vocabulary of {}", limits.vocabulary)),
        None => Ok(()),
    }
}

fn check_row(row: &PlanRow, outline: Outline, limits: &PlanLimits) -> Result<(), String> {
    let slot = row.slot;
    let end = row.start as usize + row.tokens as usize;
    let supported = row.drafts == 0 && row.adapter == 0 && row.task == Task::Generate;
    if !supported {
        return Err(format!("slot {slot}: drafts, adapters and pooling are not supported"));
    }
    if outline.seq != row.seq {
        return Err(format!("slot {slot} belongs to {}, not to {}", outline.seq, row.seq));
    }
    // A token from an earlier batch is in the history too: batches are sampled in order.
    if row.tokens == 0 || end > outline.history || end > limits.context_tokens {
        return Err(format!("slot {slot}: query {}..{end} of {} tokens", row.start, outline.history));
    }
    if row.sample && end != outline.history {
        return Err(format!("slot {slot}: sampling at {end} inside a history of {} tokens", outline.history));
    }
    if outline.table * limits.block_tokens < end {
        return Err(format!("slot {slot}: a table of {} blocks for {end} tokens", outline.table));
    }
    Ok(())
}
