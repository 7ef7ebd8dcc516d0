//! Models from the Hugging Face hub: which files on this disk are that revision of that repository?
//!
//! Layer 3. A [`Source`] is what a user names, [`Settings`] is what the environment says, and [`fetch`] answers with a folder or a file in
//! the hub's own cache layout, shared with every other tool that uses it. A branch is resolved to a commit once and said aloud; every file
//! then belongs to that commit. Transfers that break go on where they stopped, large files are held to their SHA-256, and nothing appears
//! under its name before it is whole. The crate knows nothing of models beyond their file names.

mod cache;
mod error;
mod fetch;
mod http;
mod settings;
mod source;
mod transfer;

pub use error::HubError;
pub use fetch::{Fetched, Said, fetch};
pub use settings::Settings;
pub use source::Source;
