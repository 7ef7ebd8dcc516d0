//! `cargo xtask load`: a steady load for a running server, and which policies placed it, second by second.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

/// Longest answer that is read: a short completion and its headers.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// A server that says nothing for so long has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// What to send where.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Address of the API.
    #[arg(long, default_value = "127.0.0.1:8000")]
    address: String,
    /// Name of the model.
    #[arg(long, default_value = "smollm2-135m-instruct")]
    model: String,
    /// Requests at once.
    #[arg(long, default_value_t = 16)]
    streams: u32,
    /// How long.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Output tokens of a request.
    #[arg(long, default_value_t = 32)]
    tokens: u32,
}

/// What has become of the requests since the last line.
#[derive(Default)]
struct Tally {
    /// By the generation that placed them.
    done: BTreeMap<String, u64>,
    failed: u64,
    /// Words of the last failure.
    why: String,
}

/// Sends until the time is up; one line a second.
pub fn run(args: &LoadArgs) -> Result<()> {
    ask(args, 0).context("the first request failed: is the server there?")?;
    let (tally, until) = (Arc::new(Mutex::new(Tally::default())), Instant::now() + Duration::from_secs(args.seconds));
    let numbers = Arc::new(AtomicU64::new(1));
    let senders: Vec<_> = (0..args.streams)
        .map(|_| {
            let (args, tally, numbers) = (args.clone(), Arc::clone(&tally), Arc::clone(&numbers));
            std::thread::spawn(move || {
                while Instant::now() < until {
                    let answer = ask(&args, numbers.fetch_add(1, Ordering::Relaxed));
                    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
                    match answer {
                        Ok(generation) => *tally.done.entry(generation).or_default() += 1,
                        Err(fault) => {
                            tally.failed += 1;
                            tally.why = format!("{fault:#}");
                        }
                    }
                }
            })
        })
        .collect();
    let (start, mut done, mut failed) = (Instant::now(), 0, 0);
    while senders.iter().any(|sender| !sender.is_finished()) {
        std::thread::sleep(Duration::from_secs(1));
        let last = std::mem::take(&mut *tally.lock().unwrap_or_else(PoisonError::into_inner));
        done += last.done.values().sum::<u64>();
        failed += last.failed;
        println!("{:>4} s  {}", start.elapsed().as_secs(), line(&last));
    }
    println!("{done} requests answered, {failed} failed");
    ensure!(failed == 0, "{failed} requests failed");
    Ok(())
}

fn line(tally: &Tally) -> String {
    let placed: Vec<_> =
        tally.done.iter().map(|(generation, count)| format!("{count} placed by generation {generation}")).collect();
    let mut text = if placed.is_empty() { "none answered".to_owned() } else { placed.join(", ") };
    if tally.failed > 0 {
        text.push_str(&format!("; {} FAILED: {}", tally.failed, tally.why));
    }
    text
}

/// One completion. The generation that placed it.
fn ask(args: &LoadArgs, number: u64) -> Result<String> {
    let mut stream = TcpStream::connect(&args.address).with_context(|| format!("connect to {}", args.address))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // Prompts differ from their first words on, so that none is another one's cached prefix.
    let body = format!(
        r#"{{"model": "{}", "prompt": "Request {number}: tell me a story about a river and a mill.", "max_tokens": {}, "temperature": 0}}"#,
        args.model, args.tokens
    );
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        args.address,
        body.len()
    )?;
    let mut answer = BufReader::new(stream.take(ANSWER_BYTES_MAX));
    let mut status = String::new();
    answer.read_line(&mut status)?;
    let mut generation = String::new();
    loop {
        let mut header = String::new();
        ensure!(answer.read_line(&mut header)? > 0, "the answer ends in its head");
        if header.trim().is_empty() {
            break;
        }
        if let Some(value) = header.to_ascii_lowercase().strip_prefix("x-penstock-policy-generation:") {
            generation = value.trim().to_owned();
        }
    }
    let mut text = String::new();
    answer.read_to_string(&mut text)?;
    if !status.contains(" 200 ") {
        bail!("{} {}", status.trim(), text.trim());
    }
    Ok(generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_who_placed_what_and_names_failures() {
        let mut tally = Tally::default();
        assert_eq!(line(&tally), "none answered");
        tally.done = BTreeMap::from([("1".into(), 3), ("2".into(), 13)]);
        assert_eq!(line(&tally), "3 placed by generation 1, 13 placed by generation 2");
        tally.failed = 2;
        tally.why = "HTTP/1.1 503".into();
        assert!(line(&tally).ends_with("; 2 FAILED: HTTP/1.1 503"));
    }

    #[test]
    fn the_generation_is_read_from_the_answers_head_and_a_refusal_is_a_failure() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
        let address = server.local_addr().expect("it is bound").to_string();
        let serve = std::thread::spawn(move || {
            let mut requests = Vec::new();
            for head in ["HTTP/1.1 200 OK\r\nX-Penstock-Policy-Generation: 7\r\n", "HTTP/1.1 429 Too Many Requests\r\n"]
            {
                let (mut stream, _) = server.accept().expect("a client comes");
                let (mut bytes, mut read) = ([0; 2048], 0);
                // The whole request: what is left unread when the socket closes would reset it under the client.
                while !bytes[..read].ends_with(b"}") {
                    let more = stream.read(&mut bytes[read..]).expect("it sends");
                    assert!(more > 0, "the request ends early");
                    read += more;
                }
                requests.push(String::from_utf8_lossy(&bytes[..read]).into_owned());
                write!(stream, "{head}Connection: close\r\n\r\n{{}}").expect("it reads");
            }
            requests
        });
        let args = LoadArgs { address, model: "demo".into(), streams: 1, seconds: 1, tokens: 5 };
        assert_eq!(ask(&args, 3).expect("it is a 200"), "7");
        assert!(ask(&args, 4).expect_err("it is a 429").to_string().contains("429"));
        let requests = serve.join().expect("it served two");
        assert!(requests[0].contains("Request 3:") && requests[0].contains("\"max_tokens\": 5"), "{}", requests[0]);
    }
}
