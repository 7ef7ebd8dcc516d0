//! How many instances does a component ask for, components within components included?
//!
//! The engine lays them all out one by one before it counts. Thirty components, each of which holds the one before it twice, are some hundred
//! bytes and ask for a billion: the process would end before any limit of the engine is looked at. So they are counted first, from the
//! sections alone, in time linear in the bytes.

use wasmparser::{
    ComponentAlias, ComponentExternalKind, ComponentInstance, ComponentOuterAliasKind, Instance, Parser, Payload,
};

use crate::limits::COMPONENT_DEPTH_MAX;

/// A component that is being read.
#[derive(Default)]
struct Open {
    /// Instances that each component of its index space makes.
    components: Vec<u64>,
    /// Instances that it makes itself.
    makes: u64,
    /// A core module, which makes none.
    is_module: bool,
}

/// Instances that are made when `bytes` are instantiated, core ones and components; saturating, and too many when it nests too deep.
/// None where the sections cannot be read: then the engine refuses them.
pub(crate) fn instances(bytes: &[u8]) -> Option<u64> {
    let mut open = vec![Open::default()];
    let mut largest = 1;
    for payload in Parser::new(0).parse_all(bytes) {
        match payload.ok()? {
            Payload::ModuleSection { .. } => open.push(Open { is_module: true, ..Open::default() }),
            Payload::ComponentSection { .. } if open.len() > COMPONENT_DEPTH_MAX => return Some(u64::MAX),
            Payload::ComponentSection { .. } => open.push(Open::default()),
            Payload::End(_) => {
                let closed = open.pop()?;
                let makes = closed.makes.saturating_add(1);
                let Some(outer) = open.last_mut() else { return Some(makes) };
                if !closed.is_module {
                    outer.components.push(makes);
                    largest = makes.max(largest);
                }
            }
            Payload::InstanceSection(section) => {
                for instance in section {
                    let is_made = matches!(instance.ok()?, Instance::Instantiate { .. });
                    let here = open.last_mut()?;
                    here.makes = here.makes.saturating_add(u64::from(is_made));
                }
            }
            Payload::ComponentInstanceSection(section) => {
                for instance in section {
                    if let ComponentInstance::Instantiate { component_index, .. } = instance.ok()? {
                        let here = open.last_mut()?;
                        // One that the host would bring makes nothing: no such import is taken.
                        let inside = here.components.get(component_index as usize).copied().unwrap_or(1);
                        here.makes = here.makes.saturating_add(inside);
                    }
                }
            }
            Payload::ComponentAliasSection(section) => {
                for alias in section {
                    let named = match alias.ok()? {
                        ComponentAlias::Outer { kind: ComponentOuterAliasKind::Component, count, index } => {
                            let outer = open.len().checked_sub(1 + count as usize).and_then(|at| open.get(at))?;
                            Some(outer.components.get(index as usize).copied()?)
                        }
                        // Which one it is would take a reader of types: it is one of those read so far.
                        ComponentAlias::InstanceExport { kind: ComponentExternalKind::Component, .. } => Some(largest),
                        _ => None,
                    };
                    open.last_mut()?.components.extend(named);
                }
            }
            Payload::ComponentExportSection(section) => {
                for export in section {
                    let export = export.ok()?;
                    if export.kind == ComponentExternalKind::Component {
                        let here = open.last_mut()?;
                        here.components.push(here.components.get(export.index as usize).copied()?);
                    }
                }
            }
            Payload::ComponentImportSection(section) => {
                for import in section {
                    if import.ok()?.ty.kind() == ComponentExternalKind::Component {
                        open.last_mut()?.components.push(largest);
                    }
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> Option<u64> {
        instances(&wat::parse_str(text).expect("the text is well-formed"))
    }

    #[test]
    fn instances_are_counted_through_every_way_of_naming_a_component() {
        assert_eq!(count("(component)"), Some(1));
        let plain = "(core module $m) (core instance (instantiate $m)) (core instance (instantiate $m))";
        assert_eq!(count(&format!("(component {plain})")), Some(3));
        let inner = format!("(component $c {plain})");
        assert_eq!(count(&format!("(component {inner} (instance (instantiate $c)))")), Some(1 + 3));
        let outer =
            "(component $d (alias outer 1 $c (component $e)) (instance (instantiate $e)) (instance (instantiate $e)))";
        assert_eq!(count(&format!("(component {inner} {outer} (instance (instantiate $d)))")), Some(1 + 1 + 2 * 3));
        let exported = format!("(component $d {inner} (export \"c\" (component $c)))");
        let aliased =
            "(instance $i (instantiate $d)) (alias export $i \"c\" (component $e)) (instance (instantiate $e))";
        assert_eq!(count(&format!("(component {exported} {aliased})")), Some(1 + 1 + 3));
        assert_eq!(count("(component (core module (func)))"), Some(1), "what is not instantiated makes nothing");
    }

    #[test]
    fn what_cannot_be_read_is_left_to_the_engine_and_what_nests_for_ever_is_too_much() {
        assert_eq!(instances(b"no wasm at all"), None);
        let deep = |levels: usize| format!("(component {} {})", "(component".repeat(levels), ")".repeat(levels));
        assert_eq!(count(&deep(COMPONENT_DEPTH_MAX)), Some(1));
        assert_eq!(count(&deep(COMPONENT_DEPTH_MAX + 1)), Some(u64::MAX));
    }
}
