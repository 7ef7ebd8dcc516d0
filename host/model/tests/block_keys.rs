//! Block keys against vectors that `block_keys.py` computed with Python's hashlib.
#![allow(clippy::unwrap_used)]

use penstock_base::BlockKey;
use penstock_model::{BlockKeyChain, Digest, ModelManifest, Namespace, SpanKey, block_keys, root_key};
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn manifest() -> ModelManifest {
    ModelManifest {
        name: "any".to_owned(),
        origin: None,
        architecture: "llama",
        weights: Digest::of(b"w"),
        weights_bytes: 1,
        tokenizer: Digest::of(b"t"),
        chat_template: Some(Digest::of(b"j")),
        config: Digest::of(b"c"),
        dtypes: "F32".to_owned(),
    }
}

fn namespace() -> Namespace {
    manifest().namespace(None, "bf16", "paged-16")
}

fn check(keys: Vec<BlockKey>, expected: &[&str]) {
    let keys: Vec<String> = keys.iter().map(|key| hex(&key.0)).collect();
    assert_eq!(keys, expected);
}

#[test]
fn namespaces_and_roots_match_the_vectors() {
    assert_eq!(hex(namespace().bytes()), "95cc393877bd28434e642b79e1ec876bda78c1f5d358f20800394198615c4545");
    let elsewhere = ModelManifest { origin: Some("hf:a/b@0".to_owned()), ..manifest() };
    assert_eq!(
        elsewhere.namespace(None, "bf16", "x"),
        manifest().namespace(None, "bf16", "x"),
        "equal bytes share blocks"
    );
    let other = ModelManifest { chat_template: None, ..manifest() };
    let other = other.namespace(Some(Digest::of(b"lora")), "f32", "paged-16");
    assert_eq!(hex(other.bytes()), "49b78e002311a2bf914b3249e965feda3d6280f7a8c8ed8a55e88098aca0c168");
    for (trust, expected) in [
        (&b""[..], "19e8e2679bfbc14e22d0dd8e7e6d5c5b"),
        (b"tenant-a", "60d5c2b54c7687b9376c852d4a291212"),
        (b"tenant-b", "f1ace86a986aa65fb658ab41fdb97abc"),
    ] {
        assert_eq!(hex(&root_key(&namespace(), trust).0), expected);
    }
}

#[test]
fn chains_match_the_vectors() {
    let root = root_key(&namespace(), b"tenant-a");
    let tokens: Vec<u32> = (0..10).collect();
    check(block_keys(root, 4, &tokens, &[]), &["e0d1ce693ef8bc22c9cddaa1ccc15e76", "84b13c3377337dcadc77e0aa33d79082"]);
    let wide = [0, 1, 49_151, u32::MAX].repeat(8);
    check(block_keys(root, 16, &wide, &[]), &["ecd10c87a1bbe13db185bacdb3fad509", "17d499e8a0e8c4cc748210758393d8b3"]);
    let spans = [
        SpanKey { start: 2, length: 5, content: Digest::of(b"image").0 },
        SpanKey { start: 8, length: 1, content: Digest::of(b"dot").0 },
    ];
    check(
        block_keys(root, 4, &[7; 12], &spans),
        &["8f77c6bcffbeaa4810b6a73caff31117", "16910406ff26088bb374b44d6b689e6a", "1732092101b4c323462cc16cbe78ef92"],
    );
}

/// A block is found by its key alone, so a key that one way of holding numbers makes and the other does not is never taken for it.
#[test]
fn what_is_held_in_other_ways_shares_no_key_and_no_fingerprint() {
    let tokens: Vec<u32> = (0..10).collect();
    let held = |kv_dtype, layout| {
        let namespace = manifest().namespace(None, kv_dtype, layout);
        (namespace.fingerprint(), block_keys(root_key(&namespace, b"tenant-a"), 4, &tokens, &[]))
    };
    let (bf16, of_bf16) = held("bf16", "paged-16");
    let (int8, of_int8) = held("int8", "paged-16");
    assert_eq!((bf16.as_str(), int8.as_str()), ("95cc393877bd", "d65d4f42a461"));
    check(of_bf16.clone(), &["e0d1ce693ef8bc22c9cddaa1ccc15e76", "84b13c3377337dcadc77e0aa33d79082"]);
    check(of_int8.clone(), &["0074e787f5b0237d092e77a209cda687", "6c7d64b9bb90facecc37f1c8fb968f65"]);
    // Rounding of products enters what is stored, and is part of the layout's name.
    let (other, of_other) = held("bf16", "paged-16/Int8");
    assert_ne!(other, bf16);
    assert!(of_other.iter().all(|key| !of_bf16.contains(key) && !of_int8.contains(key)));
}

#[test]
fn no_blocks_no_keys() {
    let root = BlockKey::default();
    assert_eq!(block_keys(root, 0, &[1, 2, 3], &[]), []);
    assert_eq!(block_keys(root, 4, &[1, 2, 3], &[]), []);
    assert_eq!(block_keys(root, 4, &[], &[]), []);
}

proptest! {
    /// A chain extended in any pieces gives the keys of the whole, and equal prefixes give equal keys up to the first difference.
    #[test]
    fn pieces_do_not_matter(
        tokens in prop::collection::vec(any::<u32>(), 0..80),
        cut in 0usize..80,
        size in 1usize..9,
        change in 0usize..80,
    ) {
        let root = BlockKey([3; 16]);
        let whole = block_keys(root, size, &tokens, &[]);
        prop_assert_eq!(whole.len(), tokens.len() / size);
        let (prompt, generated) = tokens.split_at(cut.min(tokens.len()));
        let mut chain = BlockKeyChain::new(root, size);
        let mut keys = chain.extend(prompt, &[]);
        keys.extend(generated.iter().filter_map(|&token| chain.push(token)));
        prop_assert_eq!(&keys, &whole);
        prop_assert_eq!(chain.parent(), whole.last().copied().unwrap_or(root));
        if change < tokens.len() {
            let mut changed = tokens.clone();
            changed[change] ^= 1;
            let other = block_keys(root, size, &changed, &[]);
            for (block, (a, b)) in whole.iter().zip(&other).enumerate() {
                prop_assert_eq!(a == b, (block + 1) * size <= change);
            }
        }
    }
}
