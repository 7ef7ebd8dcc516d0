//! Which components are at hand? Loaded ones by digest, a bounded number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::component::Component;
use crate::digest::Digest;
use crate::limits::LIBRARY_COMPONENTS_MAX;

/// Loaded components. Shared by the threads that load and prepare; machines hold their own references.
#[derive(Debug, Default)]
pub struct Library {
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    components: BTreeMap<Digest, (u64, Arc<Component>)>,
    /// Counts additions; the least recently added one that nobody uses makes room.
    clock: u64,
}

/// All components at hand are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{LIBRARY_COMPONENTS_MAX} components are loaded and in use; none makes room")]
pub struct LibraryFull;

impl Library {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps `component`. Where there is no room, the one added longest ago that nobody uses leaves.
    pub fn add(&self, component: Arc<Component>) -> Result<(), LibraryFull> {
        let mut shelf = self.shelf();
        shelf.clock += 1;
        let clock = shelf.clock;
        let digest = component.digest();
        if !shelf.components.contains_key(&digest) && shelf.components.len() >= LIBRARY_COMPONENTS_MAX {
            let unused = shelf.components.iter().filter(|(_, (_, kept))| Arc::strong_count(kept) == 1);
            let oldest = unused.min_by_key(|(_, (added, _))| *added).map(|(digest, _)| *digest);
            shelf.components.remove(&oldest.ok_or(LibraryFull)?);
        }
        shelf.components.insert(digest, (clock, component));
        Ok(())
    }

    /// The component of that digest.
    pub fn get(&self, digest: Digest) -> Option<Arc<Component>> {
        self.shelf().components.get(&digest).map(|(_, component)| Arc::clone(component))
    }

    /// All of them, by digest.
    pub fn list(&self) -> Vec<Arc<Component>> {
        self.shelf().components.values().map(|(_, component)| Arc::clone(component)).collect()
    }

    fn shelf(&self) -> std::sync::MutexGuard<'_, Shelf> {
        // No step between two consistent states can panic, so a poisoned shelf is as good as any.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
