//! The fake executor and the switches that tests hold.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use penstock_base::plan::{BatchFailure, PlanOp, PlanRow, TokenSource};
use penstock_base::{BatchId, BlockRef, SeqId, Slot};
use penstock_exec::{
    BatchResult, ExecError, Executor, Geometry, KvBytes, KvMemory, Masks, RowResult, SampledToken, SlotOpening, Step,
};
use penstock_transport::Region;

use super::{VOCABULARY, next_token};

/// Sizes of a fake.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub blocks: u32,
    pub block_size_tokens: u32,
    pub slots: u32,
    pub step_tokens: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { blocks: 512, block_size_tokens: 4, slots: 16, step_tokens: 64 }
    }
}

/// What a test can do to a fake, and what it can see of it.
#[derive(Debug, Default)]
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Steps that may still run; none is no limit.
    tickets: Option<u64>,
    /// Steps that began.
    steps: u64,
    open_slots: usize,
    most_rows: usize,
    /// Query tokens computed.
    tokens: u64,
    faults: BTreeMap<u64, Fault>,
    /// Rows of this request counter fail.
    failing_request: Option<u64>,
}

/// What goes wrong in a step, by the step's number from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// In `forward`, which changes nothing.
    Batch,
    /// In `sample`.
    Sampling,
    Executor,
    Panic,
    WrongRows,
}

impl Control {
    /// Steps run as they come.
    pub fn open() -> Arc<Self> {
        Arc::default()
    }

    /// No step begins until told.
    pub fn hold(&self) {
        self.change(|state| state.tickets = Some(0));
    }

    /// Lets `steps` more steps begin.
    pub fn let_through(&self, steps: u64) {
        self.change(|state| state.tickets = Some(state.tickets.unwrap_or(0) + steps));
    }

    /// Steps run as they come again.
    pub fn release(&self) {
        self.change(|state| state.tickets = None);
    }

    /// The step with this number, counted from 1, goes wrong.
    pub fn fault_at(&self, step: u64, fault: Fault) {
        self.change(|state| _ = state.faults.insert(step, fault));
    }

    /// The next step goes wrong.
    pub fn fault_next(&self, fault: Fault) {
        self.change(|state| _ = state.faults.insert(state.steps + 1, fault));
    }

    /// Every row of this request fails from now on.
    pub fn fail_rows_of(&self, counter: u64) {
        self.change(|state| state.failing_request = Some(counter));
    }

    pub fn steps(&self) -> u64 {
        self.read(|state| state.steps)
    }

    pub fn open_slots(&self) -> usize {
        self.read(|state| state.open_slots)
    }

    pub fn most_rows(&self) -> usize {
        self.read(|state| state.most_rows)
    }

    pub fn tokens(&self) -> u64 {
        self.read(|state| state.tokens)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for a ticket; what is to go wrong.
    fn begin(&self) -> Option<Fault> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.tickets == Some(0) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.tickets = state.tickets.map(|left| left - 1);
        state.steps += 1;
        let step = state.steps;
        state.faults.remove(&step)
    }
}

/// See the parent module.
pub struct FakeExecutor {
    geometry: Geometry,
    control: Arc<Control>,
    /// What each block holds: token at each offset.
    blocks: Arc<Memory>,
    slots: BTreeMap<Slot, Sequence>,
    /// Rows of the last forward.
    rows: Vec<PlanRow>,
    batch: BatchId,
    wrong_rows: bool,
    fails_to_sample: bool,
    fault_seen: bool,
}

/// A token and one more in each cell; 0 is nothing. Other processes can map it, so that it may travel by every transport.
struct Memory(Region);

impl Memory {
    fn cell(&self, cell: usize) -> &AtomicU32 {
        assert!(cell * size_of::<AtomicU32>() < self.0.memory().bytes(), "no cell {cell}");
        // SAFETY: it lies inside the region, which begins at a page and is kept here, and every access goes through an atomic.
        unsafe { self.0.memory().base().cast::<AtomicU32>().add(cell).as_ref() }
    }

    fn get(&self, cell: usize) -> Option<u32> {
        self.cell(cell).load(Ordering::Relaxed).checked_sub(1)
    }

    fn set(&self, cell: usize, token: Option<u32>) {
        self.cell(cell).store(token.map_or(0, |token| token + 1), Ordering::Relaxed);
    }
}

// SAFETY: the region is kept here, holds the memfd from its first byte and has sealed it, and every access goes through an atomic.
unsafe impl KvBytes for Memory {
    fn base(&self) -> NonNull<u8> {
        self.0.memory().base()
    }

    fn bytes(&self) -> usize {
        self.0.memory().bytes()
    }

    fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.memory().memfd()
    }
}

struct Sequence {
    opening: SlotOpening,
    /// Prompt and output.
    history: Vec<u32>,
    table: Vec<BlockRef>,
}

impl FakeExecutor {
    pub fn new(sizes: Sizes, control: Arc<Control>) -> Self {
        let geometry = Geometry {
            block_size_tokens: sizes.block_size_tokens,
            blocks: sizes.blocks,
            kv_token_bytes: 4,
            slots: sizes.slots,
            step_tokens_max: sizes.step_tokens,
            context_tokens_max: 4_096,
            vocabulary: VOCABULARY,
        };
        let block_bytes = sizes.block_size_tokens as usize * size_of::<AtomicU32>();
        Self {
            blocks: Arc::new(Memory(Region::shared(block_bytes, sizes.blocks).expect("memory"))),
            geometry,
            control,
            slots: BTreeMap::new(),
            rows: Vec::new(),
            batch: BatchId(0),
            wrong_rows: false,
            fails_to_sample: false,
            fault_seen: false,
        }
    }

    fn apply(&mut self, step: &Step) -> Result<(), String> {
        let mut openings = step.openings.iter();
        for op in &step.plan.ops {
            match *op {
                PlanOp::OpenSlot { slot, seq } => {
                    let opening = openings.next().ok_or("a slot without an opening")?.clone();
                    if (opening.slot, opening.seq) != (slot, seq) {
                        return Err(format!("the opening of {} stands for {seq}", opening.seq));
                    }
                    let mut history = opening.prompt.to_vec();
                    history.extend(&opening.generated);
                    self.slots.insert(slot, Sequence { opening, history, table: Vec::new() });
                }
                PlanOp::DropSlot { slot } => {
                    self.slots.remove(&slot).ok_or_else(|| format!("slot {slot} is not open"))?;
                }
                PlanOp::SetBlock { slot, group, index, block } => {
                    let sequence = self.slots.get_mut(&slot).ok_or_else(|| format!("slot {slot} is not open"))?;
                    if group != 0 || block.index >= self.geometry.blocks || index as usize > sequence.table.len() {
                        return Err(format!("block {block:?} cannot stand at {group}/{index}"));
                    }
                    if (index as usize) < sequence.table.len() {
                        sequence.table[index as usize] = block;
                    } else {
                        sequence.table.push(block);
                    }
                }
                PlanOp::CopyBlock { from, to, tokens } => {
                    for offset in 0..self.geometry.block_size_tokens {
                        let token = self.blocks.get(self.cell(from, offset)).filter(|_| offset < tokens);
                        self.blocks.set(self.cell(to, offset), token);
                    }
                }
            }
        }
        if openings.next().is_some() {
            return Err("an opening without a slot".into());
        }
        Ok(())
    }

    fn compute(&mut self, row: &PlanRow) -> Result<(), String> {
        let size = self.geometry.block_size_tokens as usize;
        let sequence =
            self.slots.get(&row.slot).ok_or_else(|| format!("a row in slot {}, which is not open", row.slot))?;
        if sequence.opening.seq != row.seq {
            return Err(format!("slot {} belongs to {}", row.slot, sequence.opening.seq));
        }
        let (start, end) = (row.start as usize, (row.start + row.tokens) as usize);
        if end > sequence.history.len() || row.tokens == 0 {
            return Err(format!("row {}..{end} of a history of {}", start, sequence.history.len()));
        }
        if let TokenSource::FromBatch { batch, .. } = row.input
            && batch >= self.batch
        {
            return Err("an input from a batch that has not been computed".into());
        }
        for position in start..end {
            let block =
                sequence.table.get(position / size).ok_or_else(|| format!("position {position} has no block"))?;
            self.blocks.set(self.cell(*block, (position % size) as u32), Some(sequence.history[position]));
        }
        Ok(())
    }

    /// What the sequence's KV holds up to `end`, read through its block table.
    fn read_back(&self, slot: Slot, end: usize) -> Option<Vec<u32>> {
        let size = self.geometry.block_size_tokens as usize;
        let table = &self.slots[&slot].table;
        let at = |position: usize| {
            let cell = self.cell(*table.get(position / size)?, (position % size) as u32);
            self.blocks.get(cell)
        };
        (0..end).map(at).collect()
    }

    fn cell(&self, block: BlockRef, offset: u32) -> usize {
        (block.index * self.geometry.block_size_tokens + offset) as usize
    }

    fn row_fails(&self, seq: SeqId) -> bool {
        self.control.read(|state| state.failing_request == Some(seq.request.counter()))
    }

    fn note(&self, tokens: u64, rows: usize) {
        let open = self.slots.len();
        self.control.change(|state| {
            state.open_slots = open;
            state.tokens += tokens;
            state.most_rows = state.most_rows.max(rows);
        });
    }
}

impl Executor for FakeExecutor {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn kv_memory(&self) -> Option<KvMemory> {
        Some(KvMemory { memory: Arc::clone(&self.blocks) as Arc<dyn KvBytes>, layers: 1, dtype_code: 9 })
    }

    fn forward(&mut self, step: &Step) -> Result<(), ExecError> {
        let error = |failure, message: &str| Err(ExecError { failure, message: message.into() });
        self.wrong_rows = false;
        self.fails_to_sample = false;
        let fault = self.control.begin();
        self.fault_seen |= fault.is_some();
        match fault {
            Some(Fault::Panic) => panic!("the test wants a panic"),
            Some(Fault::Executor) => return error(BatchFailure::Executor, "the test wants a lost executor"),
            Some(Fault::Batch) => return error(BatchFailure::Batch, "the test wants a failed batch"),
            Some(Fault::Sampling) => self.fails_to_sample = true,
            Some(Fault::WrongRows) => self.wrong_rows = true,
            None => {}
        }
        let batch = step.plan.batch;
        let done = self.apply(step).and_then(|()| {
            self.batch = batch;
            step.plan.rows.iter().try_for_each(|row| self.compute(row))
        });
        if let Err(fault) = done {
            // Behind a step that failed, one that was in flight may name what never came to be. Otherwise a plan that makes no sense is a
            // fault of the machine or of the driver, never a failure to be handled.
            assert!(self.fault_seen, "batch {batch}: {fault}\n{:?}", step.plan);
            return error(BatchFailure::Batch, &fault);
        }
        let slots: BTreeSet<_> = step.plan.rows.iter().map(|row| row.slot).collect();
        assert_eq!(slots.len(), step.plan.rows.len(), "one row a slot and step");
        assert!(step.plan.query_tokens() <= u64::from(self.geometry.step_tokens_max));
        self.note(step.plan.query_tokens(), step.plan.rows.len());
        self.rows = step.plan.rows.clone();
        Ok(())
    }

    fn sample(&mut self, _: &Masks<'_>, out: &mut BatchResult) -> Result<(), ExecError> {
        out.batch = self.batch;
        if self.fails_to_sample {
            return Err(ExecError { failure: BatchFailure::Batch, message: "the test wants sampling to fail".into() });
        }
        for row in std::mem::take(&mut self.rows) {
            let failed = self.row_fails(row.seq);
            let mut result = RowResult { slot: row.slot, seq: row.seq, tokens: Vec::new(), stop: false, failed };
            if row.sample && !failed {
                let end = (row.start + row.tokens) as usize;
                let kv = self.read_back(row.slot, end).expect("every position before the query has been computed");
                let sequence = self.slots.get_mut(&row.slot).expect("forward has checked the slot");
                let (prompt, params) = (sequence.opening.prompt.len(), &sequence.opening.params);
                let id = next_token(&kv, prompt, params);
                result.stop = params.stop_tokens.contains(&id);
                result.tokens.push(SampledToken { id, logprob: -1.0, top: Vec::new() });
                sequence.history.truncate(end);
                sequence.history.push(id);
            }
            out.rows.push(result);
        }
        if self.wrong_rows {
            out.rows.pop();
        }
        Ok(())
    }
}
