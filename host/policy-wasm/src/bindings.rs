//! The typed wall, generated from `wit/`: the life cycle once, and each decision's functions.
#![allow(missing_docs, dead_code, clippy::all, reason = "generated; the items are documented in wit/")]

/// What every component exports, and the one interface that it may import.
pub(crate) mod life {
    wasmtime::component::bindgen!({
        path: ["../../wit/types"],
        inline: "
            package penstock:wall;
            world life {
                import penstock:types/host@0.1.0;
                export penstock:types/policy@0.1.0;
            }
        ",
        imports: { default: trappable },
    });

    pub(crate) use self::penstock::types::{host, types};
}

/// Its lists are arguments of their own, which are borrowed in any case.
pub(crate) mod admission {
    wasmtime::component::bindgen!({
        path: ["../../wit/types", "../../wit/admission"],
        world: "penstock:admission/admission-policy@0.1.0",
    });
}

/// Worlds with matrices: their cells are borrowed from the host's, not copied into a list for each call.
macro_rules! with_matrix {
    ($name:ident, $path:literal, $world:literal) => {
        pub(crate) mod $name {
            wasmtime::component::bindgen!({
                path: ["../../wit/types", $path],
                world: $world,
                ownership: Borrowing { duplicate_if_necessary: true },
            });
        }
    };
}

with_matrix!(routing, "../../wit/routing", "penstock:routing/routing-policy@0.1.0");
with_matrix!(fairness, "../../wit/fairness", "penstock:fairness/fairness-policy@0.1.0");
with_matrix!(eviction, "../../wit/eviction", "penstock:eviction/eviction-policy@0.1.0");
with_matrix!(overload, "../../wit/overload", "penstock:overload/overload-policy@0.1.0");
