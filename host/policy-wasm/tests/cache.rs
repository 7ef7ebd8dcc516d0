//! Compiled code counts only with this deployment's tag over exactly these bytes.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use penstock_policy_api::Decision;
use penstock_policy_wasm::{CacheSecret, Component, Origin, Runtime, RuntimeConfig};
use support::Guest;

const SECRET: &[u8] = b"a deployment's secret of some length";

fn runtime(dir: &Path, secret: &[u8]) -> Runtime {
    let secret = CacheSecret::from_deployment(secret).expect("long enough");
    let config = RuntimeConfig { instances_max: 4, cache: Some((dir.to_owned(), secret)), ..RuntimeConfig::default() };
    Runtime::new(config).expect("the engine starts")
}

fn origin(runtime: &Runtime, component: &[u8]) -> Origin {
    Component::load(runtime, component).expect("it loads").origin()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(dir).expect("it is there").map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

#[test]
fn the_second_start_reads_what_the_first_compiled() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path().join("code");
    let component = Guest::new(Decision::Eviction).component();
    assert_eq!(origin(&runtime(&dir, SECRET), &component), Origin::Compiled);
    assert_eq!(origin(&runtime(&dir, SECRET), &component), Origin::Cached);
    let files = files(&dir);
    assert_eq!(files.len(), 1, "no unfinished file stays: {files:?}");
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!((mode(&files[0]), mode(&dir)), (0o600, 0o700));
}

#[test]
fn another_secret_compiles_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let component = Guest::new(Decision::Eviction).component();
    assert_eq!(origin(&runtime(dir.path(), SECRET), &component), Origin::Compiled);
    assert_eq!(origin(&runtime(dir.path(), b"the secret of another deployment"), &component), Origin::Compiled);
    assert_eq!(origin(&runtime(dir.path(), SECRET), &component), Origin::Compiled, "the other one wrote over it");
    assert!(CacheSecret::from_deployment(b"too short").is_none());
}

#[test]
fn one_bit_anywhere_compiles_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let runtime = runtime(dir.path(), SECRET);
    let component = Guest::new(Decision::Eviction).component();
    assert_eq!(origin(&runtime, &component), Origin::Compiled);
    let path = files(dir.path()).remove(0);
    let good = fs::read(&path).expect("readable");
    // The magic, the tag, the head of the code, its middle, its end.
    let places = [0, 15, 16, 47, 48, 49, good.len() / 3, good.len() / 2, good.len() - 1];
    for at in places {
        for bit in [0, 7] {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            fs::write(&path, &bad).expect("writable");
            assert_eq!(origin(&runtime, &component), Origin::Compiled, "bit {bit} of byte {at}");
            assert_eq!(fs::read(&path).expect("readable"), good, "what was compiled again is the same and is kept");
        }
    }
    for cut in [0, 1, 16, 47, 48, good.len() - 1] {
        fs::write(&path, &good[..cut]).expect("writable");
        assert_eq!(origin(&runtime, &component), Origin::Compiled, "cut at {cut}");
    }
    fs::write(&path, [&good[..], b"x"].concat()).expect("writable");
    assert_eq!(origin(&runtime, &component), Origin::Compiled, "a byte more");
    assert_eq!(origin(&runtime, &component), Origin::Cached);
}

#[test]
fn the_code_of_another_component_compiles_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let runtime = runtime(dir.path(), SECRET);
    let honest = Guest::new(Decision::Eviction).component();
    let other = Guest::new(Decision::Eviction).body("decide", "unreachable").component();
    assert_eq!(origin(&runtime, &honest), Origin::Compiled);
    let honest_file = files(dir.path()).remove(0);
    assert_eq!(origin(&runtime, &other), Origin::Compiled);
    let other_file = files(dir.path()).into_iter().find(|path| *path != honest_file).expect("a second file");
    fs::copy(&other_file, &honest_file).expect("writable");
    assert_eq!(origin(&runtime, &honest), Origin::Compiled);
    assert_eq!(origin(&runtime, &other), Origin::Cached);
}

#[test]
fn a_cache_that_cannot_be_written_is_no_fault() {
    let dir = tempfile::tempdir().expect("a directory");
    let runtime = runtime(dir.path(), SECRET);
    let component = Guest::new(Decision::Eviction).component();
    fs::remove_dir(dir.path()).expect("it is empty");
    assert_eq!(origin(&runtime, &component), Origin::Compiled);
    assert_eq!(origin(&runtime, &component), Origin::Compiled);
}
