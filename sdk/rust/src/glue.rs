//! What do the export crates share? One living instance a component, and its life cycle in the words of the bindings.

use penstock_base::codec::Writer;
use penstock_policy_api::{Fact, Kept, Manifest, Policy, RestoreError, RestoreInfo};

use crate::document::ParameterError;
use crate::load::Load;

/// The one instance of a component.
#[derive(Debug)]
pub struct Living<P> {
    /// Made by `configure`, or with every default by the first call that needs it.
    policy: Option<P>,
}

impl<P> Default for Living<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P> Living<P> {
    /// Not configured yet.
    pub const fn new() -> Self {
        Self { policy: None }
    }
}

impl<P: Load + Policy> Living<P> {
    /// The instance.
    pub fn policy(&mut self) -> &mut P {
        self.policy.get_or_insert_with(|| P::configure("").expect("a policy takes every default"))
    }

    /// As the export of that name.
    pub fn describe() -> Manifest {
        P::manifest()
    }

    /// As the export of that name.
    pub fn configure(&mut self, parameters: &str) -> Result<(), ParameterError> {
        self.policy = Some(P::configure(parameters)?);
        Ok(())
    }

    /// As the export of that name. Facts of a kind that this build does not know are passed over.
    pub fn observe(&mut self, flat: &[u64]) {
        let policy = self.policy();
        let (whole, _) = flat.as_chunks::<{ Fact::STRIDE }>();
        // One by one: a list of them would cost more than most policies do with a fact.
        for fact in whole.iter().filter_map(|fact| Fact::from_flat(*fact)) {
            let told = policy.observe(core::slice::from_ref(&fact));
            debug_assert!(told.is_ok(), "only the host's own wrappers fail");
        }
    }

    /// As the export of that name.
    pub fn save(&mut self) -> Vec<u8> {
        let mut out = Writer::new();
        let saved = self.policy().save(&mut out);
        debug_assert!(saved.is_ok(), "only the host's own wrappers fail");
        out.into_bytes()
    }

    /// As the export of that name.
    pub fn restore(&mut self, info: &RestoreInfo, state: &[u8]) -> Result<Kept, RestoreError> {
        self.policy().restore(info, state)
    }
}

/// Implements the life cycle's exports in an export crate: for every type that is its `Seat`.
#[doc(hidden)]
#[macro_export]
macro_rules! life {
    ($bindings:ident) => {
        use $bindings::exports::penstock::types::policy as life;
        use $bindings::penstock::types::{host, types as wit};
        use $crate::api;
        use $crate::glue::Living;

        /// What an export macro makes: a component around one policy.
        pub trait Seat: 'static {
            /// The policy.
            type Policy: $crate::Load + Decides;
            /// Borrows the one instance.
            fn with<R>(use_it: impl FnOnce(&mut Living<Self::Policy>) -> R) -> R;
        }

        fn wanted(names: Vec<api::Wanted>) -> Vec<wit::Wanted> {
            names.into_iter().map(|want| wit::Wanted { name: want.name, required: want.required }).collect()
        }

        impl<S: Seat> life::Guest for S {
            fn describe() -> wit::Manifest {
                $crate::host::connect($crate::host::Outside { log: host::log, count: host::count });
                let manifest = Living::<S::Policy>::describe();
                let tables = manifest.tables.into_iter();
                wit::Manifest {
                    name: manifest.name,
                    version: manifest.version,
                    tables: tables.map(|of| wit::Table { table: of.table, names: wanted(of.names) }).collect(),
                    facts: wanted(manifest.facts),
                    actions: wanted(manifest.actions),
                    reasons: manifest.reasons,
                    max_rows: manifest.max_rows,
                    state_schema: manifest.state_schema,
                }
            }

            fn configure(parameters: String) -> Result<(), wit::ParameterError> {
                $crate::host::connect($crate::host::Outside { log: host::log, count: host::count });
                let configured = S::with(|living| living.configure(&parameters));
                configured.map_err(|error| wit::ParameterError { field: error.field, problem: error.problem })
            }

            fn observe(facts: Vec<u64>) {
                S::with(|living| living.observe(&facts));
            }

            fn save() -> Vec<u8> {
                S::with(Living::save)
            }

            fn restore(info: wit::RestoreInfo, state: Vec<u8>) -> Result<wit::Kept, wit::RestoreError> {
                let cause = match info.cause {
                    wit::Cause::Swap => api::RestoreCause::Swap,
                    wit::Cause::Trap => api::RestoreCause::Trap,
                    wit::Cause::Restart => api::RestoreCause::Restart,
                    wit::Cause::Replay => api::RestoreCause::Replay,
                };
                let info = api::RestoreInfo {
                    schema: info.schema,
                    cause,
                    saved_now_us: info.saved_now_us,
                    now_us: info.now_us,
                    elapsed_us: info.elapsed_us,
                };
                match S::with(|living| living.restore(&info, &state)) {
                    Ok(api::Kept::Kept) => Ok(wit::Kept::Kept),
                    Ok(api::Kept::Migrated) => Ok(wit::Kept::Migrated),
                    Err(api::RestoreError::UnknownSchema) => Err(wit::RestoreError::UnknownSchema),
                    Err(_) => Err(wit::RestoreError::Damaged),
                }
            }
        }

        fn call(call: wit::Call) -> api::Call {
            api::Call { number: call.number, now_us: call.now_us, seed: call.seed }
        }
    };
}

/// Turns a request of the bindings into the contract's.
#[doc(hidden)]
#[macro_export]
macro_rules! request {
    () => {
        fn request(request: wit::Request) -> api::RequestRecord {
            api::RequestRecord {
                request_id: $crate::RequestId(request.request_id),
                tenant_id: request.tenant_id,
                flow_id: request.flow_id,
                session_id: request.session_id,
                class_rank: $crate::ClassRank::clamped(request.class_rank),
                attempt: request.attempt,
                sequences: request.sequences,
                priority: $crate::Priority(request.priority),
                input_tokens: request.input_tokens,
                max_output_tokens: request.max_output_tokens,
                deadline_us: request.deadline_us,
                traits: $crate::Traits(request.traits),
            }
        }
    };
}

/// Exports a policy: a type that is in its decision's seat, e.g. `routing::Seated<MyPolicy>`. Each export crate has one of its own name.
#[doc(hidden)]
#[macro_export]
macro_rules! component {
    ($guest:ident, $policy:ty) => {
        struct Component;

        impl $guest::Seat for Component {
            type Policy = $policy;

            fn with<R>(use_it: impl FnOnce(&mut $crate::glue::Living<$policy>) -> R) -> R {
                std::thread_local! {
                    static LIVING: core::cell::RefCell<$crate::glue::Living<$policy>> =
                        const { core::cell::RefCell::new($crate::glue::Living::new()) };
                }
                LIVING.with_borrow_mut(use_it)
            }
        }

        $guest::bindings::export!(Component with_types_in $guest::bindings);
    };
}
