//! `penstock policy`: asks the admin listener of a running server.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::Value;

use super::document;

/// Whom to ask.
#[derive(Clone, Debug, Args)]
pub struct PolicyArgs {
    /// The admin listener of the server.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8001", global = true)]
    pub admin: String,
    /// File with the bearer token, where the listener wants one.
    #[arg(long, value_name = "FILE", global = true)]
    pub admin_token_file: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: PolicyCommand,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum PolicyCommand {
    /// Hand over components (*.wasm) and sets (*.toml, *.json) without putting them in force; prints their digests.
    Load {
        /// Which.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Put a set in force: by its file, or by the digest of one that is loaded.
    Activate {
        /// A set's file, its digest, or the beginning of it.
        set: String,
    },
    /// Return to the set that was in force before.
    Rollback,
    /// Show what is in force, what is known and what happened lately.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a set or a component: seats, parameters, budgets, declared signals and facts.
    Inspect {
        /// Its digest, or the beginning of it.
        digest: String,
    },
    /// Show the last decisions.
    Log {
        /// How many.
        #[arg(short, default_value_t = 20)]
        n: usize,
        /// Only of this kind: admission, routing, order, victims, eviction, overload.
        #[arg(long)]
        question: Option<String>,
        /// Only of this seat: admission, routing, fairness, eviction, overload.
        #[arg(long)]
        seat: Option<String>,
        /// Only of this machine: gateway, replica0, ...
        #[arg(long)]
        machine: Option<String>,
        /// Only where the policy failed, or where the host refused or changed its answer.
        #[arg(long)]
        faults: bool,
        /// Only those behind this number, which counts at each machine.
        #[arg(long, value_name = "SEQUENCE")]
        since: Option<u64>,
        /// Show everything that the policy of this decision was told, instead; at the gateway, unless --machine names another.
        #[arg(long, value_name = "SEQUENCE")]
        inputs: Option<u64>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Tell the story of one request: why it waited, where it went, how it ended.
    Explain {
        /// The client's `x-request-id`, the id of the answer (chatcmpl-...), or the number in the log.
        request: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Does it.
///
/// # Errors
/// What the server said, or that there is none.
pub fn run(args: &PolicyArgs) -> Result<()> {
    let admin = Admin::new(args)?;
    match &args.command {
        PolicyCommand::Load { files } => files.iter().try_for_each(|file| {
            println!("{}  {}", admin.load(file)?, file.display());
            Ok(())
        }),
        PolicyCommand::Activate { set } => {
            let digest = if Path::new(set).is_file() { admin.load(Path::new(set))? } else { set.clone() };
            let done = admin.send("POST", &format!("/policies/{digest}/activate"), Vec::new())?;
            println!("generation {}: {}", done["generation"], text(&done["digest"]));
            Ok(())
        }
        PolicyCommand::Rollback => {
            let done = admin.send("POST", "/policies/rollback", Vec::new())?;
            println!("generation {}: {}", done["generation"], text(&done["digest"]));
            Ok(())
        }
        PolicyCommand::List { json: true } => show(&admin.get("/policies")?),
        PolicyCommand::List { json: false } => {
            print!("{}", listing(&admin.get("/policies")?));
            Ok(())
        }
        PolicyCommand::Inspect { digest } => show(&admin.get(&format!("/policies/{digest}"))?),
        PolicyCommand::Log { inputs: Some(sequence), machine, .. } => {
            let machine = machine.as_deref().unwrap_or("gateway").replace(' ', "");
            show(&admin.get(&format!("/policies/log/{machine}/{sequence}"))?)
        }
        PolicyCommand::Log { n, question, seat, machine, faults, since, json, .. } => {
            let mut query = format!("n={n}&faults={faults}");
            let named = [("question", question), ("seat", seat), ("machine", machine)];
            for (key, value) in named.iter().filter_map(|(key, value)| value.as_ref().map(|value| (key, value))) {
                query += &format!("&{key}={}", value.replace(' ', ""));
            }
            query += &since.map(|since| format!("&since={since}")).unwrap_or_default();
            let log = admin.get(&format!("/policies/log?{query}"))?;
            if *json {
                return show(&log["decisions"]);
            }
            for decision in log["decisions"].as_array().into_iter().flatten() {
                println!("{}", log_line(decision));
            }
            Ok(())
        }
        PolicyCommand::Explain { request, json } => {
            let told = admin.get(&format!("/policies/explain/{}", escaped(request)))?;
            if *json {
                return show(&told);
            }
            if let Some(others) = told["others"].as_array() {
                println!(
                    "the latest of {} requests with this id; the others are {}",
                    others.len() + 1,
                    Value::from(others.clone())
                );
            }
            for line in told["story"].as_array().into_iter().flatten() {
                println!("{}", text(line));
            }
            Ok(())
        }
    }
}

fn show(value: &Value) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

fn short(value: &Value) -> &str {
    let digest = text(value);
    digest.get(..12).unwrap_or(digest)
}

/// A set by the beginning of its digest, or by the file that was to become one.
fn named(value: &Value) -> &str {
    let name = text(value);
    if name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()) { short(value) } else { name }
}

fn listing(all: &Value) -> String {
    let mut out = format!("generation {}, set {}, by {}\n", all["generation"], short(&all["digest"]), text(&all["by"]));
    out += &format!("  began with {}\n", text(&all["origin"]));
    let rows = |name: &'static str| all[name].as_array().into_iter().flatten();
    for seat in rows("seats") {
        let component = seat.get("component").map(|component| format!("  {}", short(component))).unwrap_or_default();
        out +=
            &format!("  {:<10} {:<7} {}{component}\n", text(&seat["seat"]), text(&seat["kind"]), text(&seat["policy"]));
    }
    if let Some(why) = all["native_only"].as_str() {
        out += &format!("{why}\n");
    }
    for set in rows("sets") {
        let reason = set["reason"].as_str().map(|reason| format!("  {reason}")).unwrap_or_default();
        out += &format!("set {}  {}{reason}\n", short(&set["digest"]), text(&set["state"]));
    }
    for event in rows("history") {
        let reason = event["reason"].as_str().map(|reason| format!(": {reason}")).unwrap_or_default();
        let whose = event["seat"]
            .as_str()
            .map(|seat| format!(" {seat} {} at the {}", text(&event["policy"]), text(&event["machine"])));
        let whose = whose.unwrap_or_default();
        out += &format!("{}  {} {}{whose}{reason}\n", event["at_s"], text(&event["event"]), named(&event["set"]));
    }
    out
}

/// One path segment of whatever a client chose to write.
fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => out.push(char::from(byte)),
            _ => out += &format!("%{byte:02X}"),
        }
        out
    })
}

fn log_line(decision: &Value) -> String {
    let changed = decision["changed"].as_str().map(|what| format!("  changed: {what}")).unwrap_or_default();
    let fallback = decision["fallback"].as_str().map(|why| format!("{changed}  default: {why}")).unwrap_or(changed);
    format!(
        "{:>12} µs  {:<10} #{:<6} g{} {:<9} {:<16} request {:<20} {}{fallback}  {} ns",
        decision["at_us"],
        text(&decision["machine"]),
        decision["sequence"],
        decision["generation"],
        text(&decision["question"]),
        text(&decision["policy"]),
        text(&decision["request"]),
        text(&decision["proposal"]),
        decision["took_ns"],
    )
}

/// The admin listener.
struct Admin {
    url: String,
    token: Option<String>,
    agent: ureq::Agent,
}

impl Admin {
    fn new(args: &PolicyArgs) -> Result<Self> {
        ensure!(args.admin.starts_with("http://"), "--admin {}: an http:// address", args.admin);
        let token = match &args.admin_token_file {
            None => None,
            Some(path) => {
                let read = std::fs::read_to_string(path);
                Some(read.with_context(|| format!("read the token in {}", path.display()))?.trim().to_owned())
            }
        };
        // A refusal has a body that says why.
        let agent = ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().into();
        Ok(Self { url: args.admin.trim_end_matches('/').to_owned(), token, agent })
    }

    /// Hands over a file, with the components that it names. Its digest.
    fn load(&self, path: &Path) -> Result<String> {
        if path.extension().is_some_and(|extension| extension == "wasm") {
            let bytes = document::bytes(path, document::COMPONENT_BYTES_MAX).map_err(anyhow::Error::msg)?;
            return self.load_component(&document::digest_of(&bytes), bytes);
        }
        let document = document::read(path).map_err(anyhow::Error::msg)?;
        for (digest, bytes) in document.components {
            self.load_component(&digest, bytes)?;
        }
        let done = self.send("POST", "/policies", serde_json::to_vec(&document.set)?)?;
        Ok(text(&done["digest"]).to_owned())
    }

    fn load_component(&self, digest: &str, bytes: Vec<u8>) -> Result<String> {
        self.send("PUT", &format!("/policies/components/{digest}"), bytes)?;
        Ok(digest.to_owned())
    }

    fn get(&self, path: &str) -> Result<Value> {
        self.send("GET", path, Vec::new())
    }

    fn send(&self, method: &str, path: &str, body: Vec<u8>) -> Result<Value> {
        let mut request = ureq::http::Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(body).context("the address makes no sense")?;
        let mut answer = self.agent.run(request).with_context(|| {
            format!("no admin listener answers at {}: is the server there? name another one with --admin", self.url)
        })?;
        let body = answer.body_mut().with_config().limit(16 << 20).read_to_string().context("read the answer")?;
        let value: Value = serde_json::from_str(&body).unwrap_or(Value::Null);
        if answer.status().is_success() {
            return Ok(value);
        }
        match value["error"]["message"].as_str() {
            Some(message) => bail!("{message}"),
            None => bail!("{}: {body}", answer.status()),
        }
    }
}
