//! What can be said about NIXL and the network below it?

use std::path::PathBuf;

use super::has_rdma;

/// How NIXL is found and set up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NixlSettings {
    /// Folder that has `libnixl_capi.so`. Without, the system's loader looks where it looks for all libraries.
    pub library_dir: Option<PathBuf>,
    /// Which of NIXL's plugins moves the bytes.
    pub plugin: String,
    /// Parameters of that plugin, over its own defaults: `ucx_devices`, `num_workers` and so on.
    pub plugin_parameters: Vec<(String, String)>,
    /// Variables that must be in the environment before the library is loaded, because it reads them then: `UCX_TLS`,
    /// `UCX_NET_DEVICES`, `NIXL_PLUGIN_DIR` and the like. [`apply`](Self::apply) sets them.
    pub environment: Vec<(String, String)>,
}

impl Default for NixlSettings {
    /// UCX, found by the loader, with [`default_environment`](Self::default_environment).
    fn default() -> Self {
        Self {
            library_dir: None,
            plugin: "UCX".to_owned(),
            plugin_parameters: Vec::new(),
            environment: Self::default_environment(),
        }
    }
}

impl NixlSettings {
    /// `UCX_TLS=^shm`: no copies into the memory of another process of this host, for no fence stops those (`memfd` does it better).
    /// Where there is no RDMA, `UCX_MODULES=^ib`: its modules would load the system's libraries for it, and crash at the end.
    pub fn default_environment() -> Vec<(String, String)> {
        let mut environment = vec![("UCX_TLS".to_owned(), "^shm".to_owned())];
        if !has_rdma() {
            environment.push(("UCX_MODULES".to_owned(), "^ib".to_owned()));
        }
        environment
    }

    /// Puts the variables into the environment. What is there already stays, so that an operator has the last word, and counts as
    /// set from then on.
    ///
    /// # Safety
    ///
    /// No other thread of the process may read or write the environment meanwhile, also not in C. Call it first in `main`.
    pub unsafe fn apply(&mut self) {
        for (name, value) in &mut self.environment {
            match std::env::var(&*name) {
                Ok(there) => *value = there,
                // SAFETY: the caller's promise.
                Err(_) => unsafe { std::env::set_var(&*name, &*value) },
            }
        }
    }

    /// The first variable that the environment does not hold, or holds with another value.
    pub(super) fn unapplied(&self) -> Option<&(String, String)> {
        self.environment.iter().find(|(name, value)| std::env::var(name).as_deref() != Ok(value))
    }
}
