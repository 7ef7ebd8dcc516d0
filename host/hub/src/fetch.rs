//! From a source to files on disk: resolve the revision, choose the files, fetch those that are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;

use crate::cache::Cache;
use crate::error::HubError;
use crate::http::Hub;
use crate::settings::Settings;
use crate::source::{Source, is_commit, is_path};
use crate::transfer::{Wanted, transfer};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Small files that a model folder may have beside those it must have.
const OPTIONAL: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"];

/// Most shards of one model, as the loader has it.
const SHARDS_MAX: usize = 1_024;

/// What is said while it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said<'a> {
    /// A branch or tag was resolved; name the commit to get the same files again.
    Resolved {
        /// As asked for.
        revision: &'a str,
        /// What it is now.
        commit: &'a str,
    },
    /// A file is on its way, or has arrived when both numbers are equal.
    Progress {
        /// The file.
        file: &'a str,
        /// Bytes that are there.
        done: u64,
        /// Bytes in all.
        all: u64,
    },
}

/// A source on this disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The folder, or the one file.
    pub path: PathBuf,
    /// The commit that all of it belongs to.
    pub commit: String,
}

/// Which files: what the folder's must be, or the one file.
enum Files {
    One(String),
    Folder,
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Brings a source to this disk and says where it is. What is there already is not asked for again; a pinned source that is there
/// entirely asks nothing of the network.
///
/// # Errors
/// [`HubError`]; whatever has arrived stays for the next attempt.
pub fn fetch(source: &Source, settings: &Settings, said: &mut dyn FnMut(Said<'_>)) -> Result<Fetched, HubError> {
    let cache = Cache::new(&settings.cache, source);
    let files = source.file.clone().map_or(Files::Folder, Files::One);
    if settings.is_offline || source.is_pinned() {
        let known = cache.commit_of(&source.revision).filter(|commit| missing(&cache, commit, &files).is_none());
        if let Some(commit) = known {
            return Ok(found(&cache, files, commit));
        }
    }
    if settings.is_offline {
        let commit = cache.commit_of(&source.revision);
        let file = commit.and_then(|commit| missing(&cache, &commit, &files));
        let what = file.map_or_else(|| source.to_string(), |file| format!("{file} of {source}"));
        return Err(HubError::Offline { what, cache: settings.cache.clone() });
    }
    let hub = Hub::new(settings, source)?;
    let (commit, names) = resolve(&hub)?;
    if !source.is_pinned() {
        said(Said::Resolved { revision: &source.revision, commit: &commit });
    }
    cache.remember(&source.revision, &commit)?;
    let mut get = |file: &str| -> Result<(), HubError> {
        if cache.has(&commit, file) {
            return Ok(());
        }
        let announced = hub.announced(&commit, file)?;
        let wanted = Wanted { commit: &commit, file, announced: &announced };
        if !cache.blob(&announced.etag).is_file() {
            transfer(&hub, &cache, settings, &wanted, &mut |done, all| said(Said::Progress { file, done, all }))?;
        }
        cache.link(&commit, file, &announced.etag)
    };
    match &files {
        Files::One(file) if names.contains(file) => get(file)?,
        Files::One(file) => return Err(no_file(source, file, &names)),
        Files::Folder => {
            let must = |file: &str| if names.contains(file) { Ok(()) } else { Err(no_file(source, file, &names)) };
            // What is wrong is known before the first large file.
            must(CONFIG)?;
            must(TOKENIZER)?;
            let weights = if names.contains(INDEX) { INDEX } else { SINGLE };
            must(weights)?;
            for file in [CONFIG, TOKENIZER].into_iter().chain(OPTIONAL).filter(|file| names.contains(*file)) {
                get(file)?;
            }
            get(weights)?;
            if weights == INDEX {
                for shard in shards(&cache, &commit)? {
                    must(&shard)?;
                    get(&shard)?;
                }
            }
        }
    }
    Ok(found(&cache, files, commit))
}

/// The commit of the source's revision, and the names of its files.
fn resolve(hub: &Hub<'_>) -> Result<(String, BTreeSet<String>), HubError> {
    let bytes = hub.revision()?;
    let answer = |why: String| HubError::Answer { what: hub.source.to_string(), why };
    let revision: Revision = serde_json::from_slice(&bytes).map_err(|why| answer(why.to_string()))?;
    if !is_commit(&revision.sha) {
        return Err(answer(format!("{:?} is no commit", revision.sha)));
    }
    // Names that are no plain paths are none that a model needs.
    let names = revision.siblings.into_iter().map(|sibling| sibling.rfilename).filter(|name| is_path(name)).collect();
    Ok((revision.sha, names))
}

fn found(cache: &Cache, files: Files, commit: String) -> Fetched {
    let folder = cache.snapshot(&commit);
    let path = match files {
        Files::One(file) => folder.join(file),
        Files::Folder => folder,
    };
    Fetched { path, commit }
}

/// The first file that the cache lacks, of those that must be there.
fn missing(cache: &Cache, commit: &str, files: &Files) -> Option<String> {
    let lacks = |file: &str| !cache.has(commit, file);
    let must: Vec<String> = match files {
        Files::One(file) => vec![file.clone()],
        Files::Folder => {
            let mut must = vec![CONFIG.to_owned(), TOKENIZER.to_owned()];
            if lacks(INDEX) {
                must.push(SINGLE.to_owned());
            } else {
                must.extend(shards(cache, commit).unwrap_or_else(|_| vec![INDEX.to_owned()]));
            }
            must
        }
    };
    must.into_iter().find(|file| lacks(file))
}

/// The shards that a fetched index names.
fn shards(cache: &Cache, commit: &str) -> Result<Vec<String>, HubError> {
    let path = cache.snapshot(commit).join(INDEX);
    let bytes = std::fs::read(&path).map_err(HubError::io("read", &path))?;
    let answer = |why: String| HubError::Answer { what: INDEX.to_owned(), why };
    let index: Index = serde_json::from_slice(&bytes).map_err(|why| answer(why.to_string()))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    if names.is_empty() || names.len() > SHARDS_MAX {
        return Err(answer(format!("it names {} files, not 1..={SHARDS_MAX}", names.len())));
    }
    match names.iter().find(|name| !is_path(name)) {
        None => Ok(names.into_iter().collect()),
        Some(name) => Err(answer(format!("{name:?} is not the name of a file"))),
    }
}

/// Says which files could have been meant.
fn no_file(source: &Source, file: &str, names: &BTreeSet<String>) -> HubError {
    let ggufs: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(".gguf")).take(8).collect();
    let hint = if ggufs.is_empty() {
        "a folder needs config.json, tokenizer.json and safetensors".to_owned()
    } else {
        format!("its GGUF files are {}; name one as hf:{}:FILE", ggufs.join(", "), source.repository)
    };
    HubError::NoFile { repository: source.repository.clone(), file: file.to_owned(), hint }
}
