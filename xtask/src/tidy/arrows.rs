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
    Room { name: "journal", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "model", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "exec", uses: LAYERS_0_TO_2, pure_with: None },
    Room { name: "policy-wasm", uses: &["base", "policy-api"], pure_with: None },
    Room { name: "kernels-cpu", uses: &[], pure_with: None },
    Room {
        name: "exec-cpu",
        uses: &["base", "kv", "policy-api", "sched", "exec", "model", "kernels-cpu"],
        pure_with: None,
    },
    Room {
        name: "engine",
        uses: &["base", "kv", "policy-api", "sched", "journal", "model", "exec", "exec-cpu"],
        pure_with: None,
    },
    Room { name: "sim", uses: &["base", "kv", "policy-api", "sched", "journal"], pure_with: None },
    Room {
        name: "server",
        uses: &["base", "kv", "policy-api", "sched", "journal", "model", "exec", "exec-cpu", "engine"],
        pure_with: None,
    },
];

/// Third-party crates that only the server may use: HTTP, command line, configuration files.
const EDGE_ONLY: &[&str] = &["axum", "clap", "toml", "tower-http"];

pub fn check(metadata: &Metadata) -> Vec<String> {
    let packages = metadata.workspace_packages();
    packages
        .iter()
        .filter(|package| package.name.as_str() != "xtask")
        .flat_map(|package| check_package(package))
        .collect()
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
                    && (short == "server" || !EDGE_ONLY.contains(&name))
            }
        };
        if !is_allowed {
            faults.push(format!("{short} must not use {name} (docs/architecture.md has the layers)"));
        }
    }
    faults
}
