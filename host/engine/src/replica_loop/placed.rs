//! What a replica's driver knows of a request beside the machine.

use std::sync::Arc;

use penstock_exec::SampledToken;

use super::cached::FilledBlock;
use crate::context::RequestContext;

/// One request as this replica's driver knows it: what its sequences' slots start from.
pub(super) struct Placed {
    pub context: Arc<RequestContext>,
    pub attempt: u16,
    /// Output tokens of each sequence that count; none of one that has ended.
    pub outputs: Box<[Option<Vec<u32>>]>,
    /// Tokens that do not count until somebody owns the request.
    pub kept: Vec<SampledToken>,
    /// Keys of blocks that the outputs have filled, where tokens of blocks are told.
    pub behind: Vec<FilledBlock>,
}

impl Placed {
    pub fn new(context: Arc<RequestContext>, attempt: u16) -> Self {
        let outputs = (0..context.manifest.sequences).map(|_| Some(Vec::new())).collect();
        Self { context, attempt, outputs, kept: Vec::new(), behind: Vec::new() }
    }

    /// Output of a sequence that lives.
    pub fn output(&mut self, index: u16) -> Option<&mut Vec<u32>> {
        self.outputs.get_mut(usize::from(index))?.as_mut()
    }
}
