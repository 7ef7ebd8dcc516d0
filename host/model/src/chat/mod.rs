//! Chat templates: messages to the one text that the model was trained to see.
//!
//! A template is a program from a model file run over text from a stranger. It runs with fuel, a recursion limit and an output limit, sees
//! no clock (the caller gives the date), and its result remembers where message text spells control tokens, so that
//! [`crate::Tokenizer::encode_chat`] reads the template's control tokens and never a user's.

mod engine;
mod marks;
mod time;

use minijinja::Environment;
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::limits::TEMPLATE_BYTES_MAX;
use crate::manifest::Digest;
use crate::tokenizer::Tokenizer;

pub use time::CivilTime;

/// A parsed template. Immutable; rendering takes `&self` from any thread.
pub struct ChatTemplate {
    environment: Environment<'static>,
    digest: Digest,
    bos: String,
    eos: String,
}

/// What a template may use besides the messages.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// Whether to end with the opening of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Tool definitions, a JSON array.
    pub tools: Option<Value>,
    /// Further variables by name (`chat_template_kwargs`). They cannot replace `messages` or the special tokens.
    pub variables: Map<String, Value>,
    /// The date for `strftime_now`; templates that ask for it are refused without one.
    pub now: Option<CivilTime>,
}

/// A conversation as text, with the places where no control token may be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// Byte offsets inside spellings of control tokens that came from messages: no control token may be read across them. Ascending;
    /// empty for ordinary messages.
    pub barriers: Vec<usize>,
}

impl ChatTemplate {
    /// Parses a template. `tokenizer` gives the spellings of `bos_token` and `eos_token`.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, ModelError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(ModelError::TemplateBroken {
                what: format!("{} bytes exceed the limit of {TEMPLATE_BYTES_MAX}", source.len()),
            });
        }
        Ok(Self {
            environment: engine::environment(source)?,
            digest: Digest::of(source.as_bytes()),
            bos: tokenizer.spelling(tokenizer.bos()),
            eos: tokenizer.spelling(tokenizer.eos()),
        })
    }

    /// Hash of the template's text.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Renders a conversation. `messages` is a JSON array of objects with `role` and `content` as the OpenAI API has them.
    ///
    /// Message text that spells a control token is kept as text. Where the template's own logic depends on such text the request is
    /// refused ([`ModelError::ControlTokenInText`]) rather than read differently.
    pub fn render(
        &self,
        messages: &Value,
        options: &ChatOptions,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedChat, ModelError> {
        check_roles(messages)?;
        let inputs =
            Inputs { messages: messages.clone(), tools: options.tools.clone(), variables: options.variables.clone() };
        let text = self.run(&inputs, options)?;
        let Some(marked) = marks::mark(&inputs, tokenizer.guard())? else {
            return Ok(RenderedChat { text, barriers: Vec::new() });
        };
        let with_marks = self.run(&marked.inputs, options)?;
        let (without, barriers) = marks::take_out(&with_marks, marked.sentinel);
        if without != text {
            return Err(ModelError::ControlTokenInText { token: marked.spelling });
        }
        Ok(RenderedChat { text, barriers })
    }

    fn run(&self, inputs: &Inputs, options: &ChatOptions) -> Result<String, ModelError> {
        let mut context: Map<String, Value> = inputs.variables.clone();
        context.insert("messages".to_owned(), inputs.messages.clone());
        // Templates test `tools is none` and `tools is defined` alike; transformers always passes both names.
        context.insert("tools".to_owned(), inputs.tools.clone().unwrap_or(Value::Null));
        context.entry("documents").or_insert(Value::Null);
        context.insert("add_generation_prompt".to_owned(), Value::Bool(options.add_generation_prompt));
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            if !token.is_empty() {
                context.insert(name.to_owned(), Value::String(token.clone()));
            }
        }
        engine::run(&self.environment, context, options.now)
    }
}

/// Everything in a conversation that a stranger wrote.
#[derive(Clone, Debug)]
struct Inputs {
    messages: Value,
    tools: Option<Value>,
    variables: Map<String, Value>,
}

/// Templates may spell control tokens from roles (`<|` + role + `|>`) and compare them, so a role holds only letters, digits and spaces.
/// Which roles exist is the edge's to say.
fn check_roles(messages: &Value) -> Result<(), ModelError> {
    let refuse = |what: String| Err(ModelError::TemplateRefused { what });
    let Some(messages) = messages.as_array() else { return refuse("messages are not a list".to_owned()) };
    for (at, message) in messages.iter().enumerate() {
        let Some(role) = message.get("role").and_then(Value::as_str) else {
            return refuse(format!("message {at} has no role"));
        };
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | ' ');
        if role.len() > 64 || !role.chars().all(word) {
            return refuse(format!("the role of message {at} is not made of ASCII letters, digits and spaces"));
        }
    }
    Ok(())
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("digest", &self.digest).finish_non_exhaustive()
    }
}
