//! The template engine, set up as transformers sets up Jinja: same white-space rules, same extra functions, with limits.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::{Map, Value};

use super::CivilTime;
use crate::error::ModelError;
use crate::json_text::Layout;
use crate::limits::{RENDERED_BYTES_MAX, TEMPLATE_FUEL, TEMPLATE_RECURSION_MAX};

const NAME: &str = "chat_template";
/// The variable that carries the caller's date; not a name a template would use.
const NOW: &str = "__now";

/// An environment that holds one parsed template.
pub(super) fn environment(source: &str) -> Result<Environment<'static>, ModelError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| ModelError::TemplateBroken { what: describe(&e) })?);
    environment.set_fuel(Some(TEMPLATE_FUEL));
    environment.set_recursion_limit(TEMPLATE_RECURSION_MAX);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refused(message)))
    });
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment
        .add_template_owned(NAME, source.to_owned())
        .map_err(|e| ModelError::TemplateBroken { what: describe(&e) })?;
    Ok(environment)
}

/// Runs the template over its variables.
pub(super) fn run(
    environment: &Environment<'static>,
    mut context: Map<String, Value>,
    now: Option<CivilTime>,
) -> Result<String, ModelError> {
    context.remove(NOW);
    if let Some(now) = now {
        let fields =
            [now.year, now.month.into(), now.day.into(), now.hour.into(), now.minute.into(), now.second.into()];
        context.insert(NOW.to_owned(), fields.to_vec().into());
    }
    let template = environment.get_template(NAME).map_err(|e| ModelError::TemplateBroken { what: describe(&e) })?;
    let mut output = Bounded { bytes: Vec::new(), overflowed: false };
    let result = template.render_captured_to(Jinja::from(Serde(&context)), &mut output).map(drop);
    if output.overflowed {
        return Err(ModelError::TemplateLimit { limit: "output size" });
    }
    result.map_err(|e| classify(&e))?;
    String::from_utf8(output.bytes).map_err(|e| ModelError::TemplateBroken { what: e.to_string() })
}

/// Output that ends at a limit.
struct Bounded {
    bytes: Vec<u8>,
    overflowed: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > RENDERED_BYTES_MAX {
            self.overflowed = true;
            return Err(io::Error::other("rendered text is too long"));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a template said through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

fn classify(error: &Error) -> ModelError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Refused(what)) = cause.downcast_ref() {
            return ModelError::TemplateRefused { what: what.clone() };
        }
        if let Some(inner) = cause.downcast_ref::<Error>() {
            if inner.kind() == ErrorKind::OutOfFuel {
                return ModelError::TemplateLimit { limit: "fuel" };
            }
            if inner.detail().is_some_and(|detail| detail.contains("recursion limit")) {
                return ModelError::TemplateLimit { limit: "recursion depth" };
            }
        }
        source = cause.source();
    }
    ModelError::TemplateBroken { what: describe(error) }
}

/// Kind, detail and line, without the source excerpt that the debug form prints.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn strftime_now(state: &State<'_, '_>, format: String) -> Result<String, Error> {
    let fault = |what: &str| Error::new(ErrorKind::InvalidOperation, what.to_owned());
    let now = state.lookup(NOW).ok_or_else(|| fault("the template asks for the date and none was given"))?;
    let field = |at: usize| now.get_item_by_index(at).ok().and_then(|v| i32::try_from(v).ok()).unwrap_or_default();
    let small = |at: usize| u8::try_from(field(at)).unwrap_or_default();
    let time = CivilTime {
        year: field(0),
        month: small(1),
        day: small(2),
        hour: small(3),
        minute: small(4),
        second: small(5),
    };
    time.format(&format).ok_or_else(|| fault("the template uses an unknown date format"))
}

/// transformers' `tojson`: `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`.
fn to_json(value: Jinja, options: Kwargs) -> Result<String, Error> {
    let _: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let mut layout = Layout::python(indent.map(|indent| indent.min(16)));
    if let Some([item, key]) = separators.as_deref() {
        layout.item.clone_from(item);
        layout.key.clone_from(key);
    }
    layout.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let value =
        serde_json::to_value(&value).map_err(|e| Error::new(ErrorKind::InvalidOperation, "tojson").with_source(e))?;
    Ok(layout.write(&value))
}
