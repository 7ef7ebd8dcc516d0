//! The table in memory.

use penstock_discovery::{Memory, Settings};

use crate::{Arena, cases};

struct Table(Memory);

impl Arena for Table {
    type Service = Memory;

    async fn open(settings: Settings) -> Option<Self> {
        Some(Self(Memory::new(settings).unwrap()))
    }

    fn client(&self) -> Memory {
        self.0.clone()
    }

    fn narrow(&self, workers_max: usize) -> Memory {
        self.0.narrowed(workers_max)
    }

    async fn lose(&mut self) {
        self.0.set_reachable(false);
    }

    async fn restore(&mut self) {
        self.0.set_reachable(true);
    }
}

cases::suite!(Table);
