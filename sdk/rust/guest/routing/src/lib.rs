//! Exports a routing policy as a component: `penstock_guest_routing::export!(Seated<MyPolicy>)`.
//!
//! Bindings and conversions, nothing else; natively the macro expands to nothing.

#[cfg(target_family = "wasm")]
extern crate self as penstock_guest_routing;

#[cfg(target_family = "wasm")]
#[doc(hidden)]
#[allow(missing_docs, clippy::all, reason = "generated from wit/")]
pub mod bindings {
    wit_bindgen::generate!({
        path: ["../../../../wit/types", "../../../../wit/routing"],
        world: "penstock:routing/routing-policy@0.1.0",
        generate_all,
        pub_export_macro: true,
        export_macro_name: "export",
        default_bindings_module: "penstock_guest_routing::bindings",
        runtime_path: "penstock_guest_routing::wit_bindgen::rt",
    });
}

#[doc(hidden)]
pub use penstock_policy_sdk as sdk;
#[cfg(target_family = "wasm")]
#[doc(hidden)]
pub use wit_bindgen;

#[cfg(target_family = "wasm")]
mod glue;
#[cfg(target_family = "wasm")]
#[doc(hidden)]
pub use glue::Seat;

/// Makes the crate a component around `$policy`, a type in the routing seat.
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        #[cfg(target_family = "wasm")]
        mod component {
            use super::*;
            $crate::sdk::component!(penstock_guest_routing, $policy);
        }
    };
}
