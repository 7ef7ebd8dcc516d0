//! What a replica's driver knows of a request beside the machine.

use std::sync::Arc;

use penstock_exec::SampledToken;

use super::cached::FilledBlock;
use crate::context::{Placement, RequestContext};

/// One request as this replica's driver knows it: what its sequences' slots start from.
pub(super) struct Placed {
    pub context: Arc<RequestContext>,
    pub attempt: u16,
    /// Output tokens of each sequence that count, those of earlier attempts included; none of one that has ended.
    pub outputs: Box<[Option<Vec<u32>>]>,
    /// Output tokens of earlier attempts, which are prompt to the machine.
    pub resumed: u32,
    /// Tokens that do not count until somebody owns the request.
    pub kept: Vec<SampledToken>,
    /// Keys of blocks that the outputs have filled, where tokens of blocks are told.
    pub behind: Vec<FilledBlock>,
}

impl Placed {
    pub fn new(context: Arc<RequestContext>, attempt: u16) -> Self {
        Self::resumed(Placement { context, resumed: Box::default() }, attempt)
    }

    pub fn resumed(placement: Placement, attempt: u16) -> Self {
        let Placement { context, resumed } = placement;
        let outputs = (0..context.manifest.sequences).map(|_| Some(resumed.to_vec())).collect();
        let resumed = resumed.len() as u32;
        Self { context, attempt, outputs, resumed, kept: Vec::new(), behind: Vec::new() }
    }

    /// Output of a sequence that lives.
    pub fn output(&mut self, index: u16) -> Option<&mut Vec<u32>> {
        self.outputs.get_mut(usize::from(index))?.as_mut()
    }
}
