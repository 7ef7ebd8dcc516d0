//! What the drivers of a hand-off's two replicas do: prefill, writes, fences, digests, decoding; each with its own check of what lies where.

use super::*;

/// What must lie in a block's layer: depends on nothing but the request and the place.
fn content(request: RequestId, block: u32, layer: u32) -> u64 {
    mix(mix(request.0, u64::from(block)), u64::from(layer))
}

fn tail(request: RequestId) -> u64 {
    mix(request.0, u64::MAX)
}

fn digest(content: &[u64]) -> u64 {
    content.iter().fold(7, |sum, word| mix(sum, *word))
}

/// What chunk `index` carries.
fn expected(request: RequestId, part: Part) -> Vec<u64> {
    match part {
        Part::Tail => vec![tail(request)],
        Part::Kv { first_block, blocks, first_layer, layers } => (first_block..first_block + blocks)
            .flat_map(|block| (first_layer..first_layer + layers).map(move |layer| content(request, block, layer)))
            .collect(),
    }
}

impl World {
    // --- Prefill, writes, decode -----------------------------------------------------------------------------------------------

    /// One layer group of the next two blocks, as a step of the sender's executor would.
    pub(super) fn prefill(&mut self, transfer: TransferId) {
        let (now, epoch) = (self.now, self.epochs[1]);
        let Some(prompt) = self.prompts.get_mut(&transfer) else { return };
        let (first, step) = (prompt.computed, 2.min(prompt.blocks - prompt.computed));
        let mut events = Vec::new();
        if prompt.layers == 0 && prompt.table.len() == first {
            if self.sender_kv.append(now, PREFILL_OWNER, &mut prompt.table, step).is_err() {
                return self.step_sender(SenderEvent::PrefillFailed(transfer));
            }
            let placed = prompt.table.blocks()[first as usize..].to_vec();
            events.push(SenderEvent::Placed { transfer, blocks: placed });
        }
        let layers = prompt.layers;
        for (block, at) in (first..first + step).zip(&prompt.table.blocks()[first as usize..]) {
            for layer in layers..(layers + 2).min(LAYERS) {
                self.sender_memory[at.index as usize][layer as usize] = content(prompt.manifest.request, block, layer);
            }
        }
        prompt.layers += 2;
        if prompt.layers >= LAYERS {
            (prompt.layers, prompt.computed) = (0, first + step);
        }
        events.push(SenderEvent::Computed { transfer, blocks: prompt.computed, layers: prompt.layers });
        if prompt.computed == prompt.blocks {
            prompt.done = true;
            let (request, grid, local) = (prompt.manifest.request, prompt.grid, prompt.local);
            let parts = (0..grid.chunks()).filter_map(|index| grid.part(index).map(|part| (index, part)));
            let sum = parts
                .fold(0u64, |sum, (index, part)| sum.wrapping_add(chunk_sum(index, digest(&expected(request, part)))));
            events.push(SenderEvent::Prefilled { transfer, seal: Seal { sum, sampled_tokens: 1 } });
            if local {
                self.put(now + Duration::from_ms(20), Item::Decoded { party: Party::Sender, transfer, epoch });
            }
        } else {
            self.put(now + Duration::from_us(700), Item::Prefill { transfer, epoch });
        }
        for event in events {
            if self.epochs[1] == epoch {
                self.step_sender(event);
            }
        }
    }

    pub(super) fn write(&mut self, transfer: TransferId, index: u32, stamp: Instant) {
        let epoch = self.epochs[1];
        let Some(prompt) = self.prompts.get(&transfer) else { self.fail("a chunk of nothing is to be written") };
        let Some((to, targets)) = prompt.bound.clone() else { self.fail("a write goes nowhere") };
        let Some(part) = prompt.grid.part(index) else { self.fail("no such chunk") };
        let first = prompt.grid.first_block;
        let (blocks, layers) = match part {
            Part::Tail => (Vec::new(), (0, 0)),
            Part::Kv { first_block, blocks, first_layer, layers } => {
                let pair = |block: u32| (prompt.table.blocks()[block as usize], targets[(block - first) as usize]);
                ((first_block..first_block + blocks).map(pair).collect(), (first_layer, layers))
            }
        };
        let content = expected(prompt.manifest.request, part);
        let broken = self.chance(self.spec.broken_ppm);
        let from = peer(Party::Sender, epoch);
        let write = Write { transfer, index, stamp, from, to, blocks, layers, content, broken };
        if self.is_cut(Party::Sender, Party::Receiver) || self.chance(self.spec.loss_ppm) {
            return;
        }
        let times = 1 + u32::from(self.chance(self.spec.twice_ppm));
        for time in 0..times {
            let late = if time > 0 || self.chance(self.spec.late_ppm) {
                Duration::from_ms(self.word() % 1_900)
            } else {
                Duration::ZERO
            };
            // Never for longer than the grace, which is what all have agreed upon.
            let took = Duration(self.latency().0 + late.0).min(Duration::from_ms(1_990));
            let at = self.now + took;
            *self.reading.entry((transfer, epoch)).or_default() += 1;
            self.put(at, Item::Land { write: write.clone(), notice: time == 0 });
        }
    }

    /// A write reads the sender's block and arrives in the receiver's, whatever the machines think by then.
    pub(super) fn land(&mut self, write: &Write, notice: bool) {
        let key = (write.transfer, write.from.epoch.0);
        self.check_read(write);
        if let Some(left) = self.reading.get_mut(&key) {
            *left -= 1;
        }
        self.tell_quiet(key.0, key.1);
        let fenced = self.fenced.contains(&(write.transfer, write.to.epoch.0));
        if self.down[2] || write.to.epoch.0 != self.epochs[2] || fenced {
            return;
        }
        let mut words = write.content.iter();
        for (_, to) in &write.blocks {
            match self.receiver_kv.pool().state(*to) {
                Some(BlockState::Landing) => {}
                Some(BlockState::Quarantined) => self.outcome.writes_into_quarantine += 1,
                other => {
                    self.fail(format!("a late write of transfer {} touches a block that is {other:?}", write.transfer))
                }
            }
            for layer in write.layers.0..write.layers.0 + write.layers.1 {
                let word = *words.next().expect("a word a block and layer");
                self.receiver_memory[to.index as usize][layer as usize] = if write.broken { !word } else { word };
            }
        }
        if notice {
            let sent = digest(&write.content);
            let arrived = if write.broken { !sent } else { sent };
            let word = SenderWord::Chunk { index: write.index, sent, arrived };
            let body = ToReceiver { stamp: write.stamp, word };
            let message = Between { transfer: write.transfer, from: write.from, to: write.to, body };
            let at = self.now + self.latency();
            self.put(at, Item::Receiver(ReceiverEvent::Sender(message)));
        }
    }

    /// While a write is under way, the blocks that it reads hold what they held.
    pub(super) fn check_read(&self, write: &Write) {
        if write.from.epoch.0 != self.epochs[1] || self.down[1] {
            return;
        }
        let mut words = write.content.iter();
        for (from, _) in &write.blocks {
            let state = self.sender_kv.pool().state(*from);
            if !matches!(state, Some(BlockState::Active | BlockState::Leased)) {
                self.fail(format!("transfer {} reads a block that is {state:?}", write.transfer));
            }
            for layer in write.layers.0..write.layers.0 + write.layers.1 {
                if self.sender_memory[from.index as usize][layer as usize] != *words.next().expect("a word each") {
                    self.fail("a block was written while it is read");
                }
            }
        }
    }

    pub(super) fn tell_quiet(&mut self, transfer: TransferId, epoch: u64) {
        let key = (transfer, epoch);
        if self.quiet_wanted.contains(&key) && self.reading.get(&key).is_none_or(|left| *left == 0) {
            self.quiet_wanted.remove(&key);
            let at = self.now + self.latency();
            self.put(at, Item::Quiet { transfer, epoch });
        }
    }

    /// The sum over what lies in the blocks that were written to, as the receiver's driver reads it.
    pub(super) fn digest_of(&self, transfer: TransferId) -> u64 {
        let Some((grid, blocks, request)) = self.landing.get(&(transfer, self.epochs[2])) else { return 0 };
        let parts = (0..grid.chunks()).filter_map(|index| grid.part(index).map(|part| (index, part)));
        parts.fold(0u64, |sum, (index, part)| {
            let words = match part {
                Part::Tail => vec![tail(*request)],
                Part::Kv { first_block, blocks: count, first_layer, layers } => (first_block..first_block + count)
                    .map(|block| blocks[(block - grid.first_block) as usize].index as usize)
                    .flat_map(|at| (first_layer..first_layer + layers).map(move |layer| (at, layer as usize)))
                    .map(|(at, layer)| self.receiver_memory[at][layer])
                    .collect(),
            };
            sum.wrapping_add(chunk_sum(index, digest(&words)))
        })
    }

    pub(super) fn start(&mut self, started: Started, epoch: u64) {
        self.outcome.started += 1;
        let request = started.manifest.request;
        let blocks = started.manifest.input_tokens.div_ceil(BLOCK_TOKENS);
        let mut table = started.table;
        if table.len() != blocks || started.sampled_tokens != 1 {
            self.fail("what was installed is not the prompt");
        }
        for (block, at) in (0..).zip(table.blocks()) {
            for layer in 0..LAYERS {
                if self.receiver_memory[at.index as usize][layer as usize] != content(request, block, layer) {
                    self.fail(format!("block {block} layer {layer} of request {request} has other content"));
                }
            }
        }
        self.receiver_kv.append(self.now, started.owner, &mut table, 1).expect("promised");
        self.receiver_kv.unreserve(started.owner, u32::MAX);
        // Decoding writes behind the prompt, in its last block and in the one that follows.
        let own = [table.blocks()[blocks as usize - 1], table.blocks()[blocks as usize]]
            .map(|at| (at.index, mix(request.0, u64::from(at.index))));
        for (index, word) in own {
            self.receiver_memory[index as usize][0] = word;
        }
        let running = Running { request, table, blocks, own: own.to_vec() };
        if self.running.insert(started.transfer, running).is_some() {
            self.fail("a request was started twice");
        }
        let at = self.now + Duration::from_ms(1 + self.word() % 2_500);
        self.put(at, Item::Decoded { party: Party::Receiver, transfer: started.transfer, epoch });
    }

    pub(super) fn decoded(&mut self, party: Party, transfer: TransferId) {
        match party {
            Party::Receiver => self.finish_running(transfer),
            Party::Sender => {
                if let Some(mut prompt) = self.prompts.remove(&transfer) {
                    self.sender_kv.release(self.now, &mut prompt.table, None);
                }
            }
            Party::Coordinator => {}
        }
    }

    /// Nothing but the sequence itself has written to its blocks.
    pub(super) fn finish_running(&mut self, transfer: TransferId) {
        let Some(mut running) = self.running.remove(&transfer) else { return };
        for (block, at) in (0..running.blocks).zip(running.table.blocks()) {
            for layer in 1..LAYERS {
                if self.receiver_memory[at.index as usize][layer as usize] != content(running.request, block, layer) {
                    self.fail("a block was written while its sequence ran");
                }
            }
        }
        if running.own.iter().any(|(index, word)| self.receiver_memory[*index as usize][0] != *word) {
            self.fail("what decoding wrote was overwritten");
        }
        self.receiver_kv.release(self.now, &mut running.table, None);
        self.receiver.recycle(running.table);
    }
}
