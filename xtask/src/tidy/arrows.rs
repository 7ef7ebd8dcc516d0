//! Which crate may use which. A new arrow is an ADR first and a line here second.

use std::collections::BTreeSet;

use cargo_metadata::{DependencyKind, Metadata, Package};

/// A crate, the project's own crates that it may use, and whether it is pure (no third-party crate but these).
struct Room {
    name: &'static str,
    uses: &'static [&'static str],
    /// Layers 0 to 2 take nothing from outside but what stands here.
    pure_with: Option<&'static [&'static str]>,
}

const LAYERS_0_TO_2: &[&str] = &["base", "kv", "policy-api", "sched"];

const ROOMS: &[Room] = &[
    Room { name: "base", uses: &[], pure_with: Some(&["hashbrown"]) },
    Room { name: "kv", uses: &["base"], pure_with: Some(&[]) },
    Room { name: "policy-api", uses: &["base"], pure_with: Some(&[]) },
    Room { name: "sched", uses: &["base", "kv", "policy-api"], pure_with: Some(&[]) },
    Room { name: "bench", uses: &[], pure_with: None },
    Room { name: "journal", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "model", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "hub", uses: &[], pure_with: None },
    Room { name: "transport", uses: &[], pure_with: None },
    Room { name: "discovery", uses: &[], pure_with: None },
    Room { name: "kv-events", uses: &[], pure_with: None },
    Room { name: "control", uses: &[], pure_with: None },
    Room { name: "exec", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "policy-wasm", uses: &["base", "policy-api"], pure_with: None },
    // The guests' side of the wall, judged from the host's.
    Room { name: "conformance", uses: &["base", "policy-api", "policy-wasm", "policy-harness"], pure_with: None },
    Room { name: "kernels-cpu", uses: &[], pure_with: None },
    Room {
        name: "exec-cpu",
        uses: &["base", "kv", "policy-api", "sched", "exec", "model", "kernels-cpu"],
        pure_with: None,
    },
    Room {
        name: "engine",
        uses: &[
            "base",
            "kv",
            "policy-api",
            "sched",
            "journal",
            "model",
            "exec",
            "exec-cpu",
            "transport",
            "control",
            "kv-events",
        ],
        pure_with: None,
    },
    Room { name: "sim", uses: &["base", "kv", "policy-api", "sched", "journal"], pure_with: None },
    Room {
        name: "server",
        uses: &[
            "base",
            "kv",
            "policy-api",
            "sched",
            "journal",
            "model",
            "exec",
            "exec-cpu",
            "engine",
            "policy-wasm",
            "bench",
            "hub",
            "control",
            "discovery",
        ],
        pure_with: None,
    },
];

/// The guest side: rooms that are filled by folder, since policies are added without asking.
struct GuestSide {
    /// Folder, from the root.
    folder: &'static str,
    /// Own crates that everything below it may use; a `*` at the end stands for any rest.
    uses: &'static [&'static str],
    /// Third-party crates likewise. None: any, since it is a tool of the build and never part of a policy.
    third_party: Option<&'static [&'static str]>,
}

/// The first that fits counts.
const GUEST_SIDE: &[GuestSide] = &[
    GuestSide { folder: "policies/hostile", uses: &[], third_party: None },
    GuestSide { folder: "sdk/rust/template", uses: &["policy-sdk", "guest-*"], third_party: Some(&["libm"]) },
    GuestSide { folder: "policies", uses: &["policy-sdk", "guest-*"], third_party: Some(&["libm"]) },
    GuestSide { folder: "sdk/rust/componentise", uses: &[], third_party: None },
    GuestSide { folder: "sdk/rust/template", uses: &["policy-sdk", "guest-*"], third_party: Some(&["libm"]) },
    GuestSide { folder: "sdk/rust/guest", uses: &["policy-sdk"], third_party: Some(&["wit-bindgen"]) },
    GuestSide { folder: "sdk/rust", uses: &["base", "policy-api"], third_party: Some(&["libm"]) },
];

/// Third-party crates that only the server may use: HTTP, command line, configuration files.
const EDGE_ONLY: &[&str] = &["axum", "clap", "toml", "tower-http", "ureq"];

/// The client of the model hub speaks HTTP as well, and nothing else of the edge's.
const ALSO_ASKS: (&str, &str) = ("hub", "ureq");

pub fn check(metadata: &Metadata) -> Vec<String> {
    let root = &metadata.workspace_root;
    let packages = metadata.workspace_packages();
    let checked = packages.iter().filter(|package| package.name.as_str() != "xtask");
    let faults = checked.flat_map(|package| {
        let dir = package.manifest_path.parent().and_then(|dir| dir.strip_prefix(root).ok());
        match GUEST_SIDE.iter().find(|side| dir.is_some_and(|dir| dir.starts_with(side.folder))) {
            Some(side) => check_guest(package, side),
            None => check_package(package),
        }
    });
    faults.collect()
}

fn check_guest(package: &Package, side: &GuestSide) -> Vec<String> {
    let fits = |name: &str, rule: &&str| rule.strip_suffix('*').map_or(*rule == name, |start| name.starts_with(start));
    let normal = package.dependencies.iter().filter(|dependency| dependency.kind == DependencyKind::Normal);
    let is_allowed = |name: &str| match name.strip_prefix("penstock-") {
        Some(own) => side.uses.iter().any(|rule| fits(own, rule)),
        None => side.third_party.is_none_or(|names| names.contains(&name)),
    };
    let banned = normal.filter(|dependency| !is_allowed(&dependency.name));
    banned.map(|dependency| format!("{} must not use {}", package.name, dependency.name)).collect()
}

fn check_package(package: &Package) -> Vec<String> {
    let Some(short) = package.name.strip_prefix("penstock-") else {
        return vec![format!("package {} is not called penstock-*", package.name)];
    };
    let Some(room) = ROOMS.iter().find(|room| room.name == short) else {
        return vec![format!("crate {short} has no layer: add it to xtask/src/tidy/arrows.rs with an ADR")];
    };
    let normal: BTreeSet<&str> = package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind == DependencyKind::Normal)
        .map(|dependency| dependency.name.as_str())
        .collect();
    let mut faults = Vec::new();
    for name in normal {
        let is_allowed = match name.strip_prefix("penstock-") {
            Some(own) => room.uses.contains(&own),
            None => {
                room.pure_with.is_none_or(|extra| extra.contains(&name))
                    && (short == "server" || !EDGE_ONLY.contains(&name) || (short, name) == ALSO_ASKS)
            }
        };
        if !is_allowed {
            faults.push(format!("{short} must not use {name} (docs/architecture.md has the layers)"));
        }
    }
    faults
}
