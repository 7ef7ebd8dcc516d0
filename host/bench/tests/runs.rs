//! Whole runs against a server of the test's own, on real sockets.

mod support;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use penstock_bench::{BenchError, Endpoint, Load, Objectives, Outcome, Plan, Prompts, Synthetic, run, save};
use support::{Answer, Seen, Server};

fn count(value: usize) -> NonZeroUsize {
    NonZeroUsize::new(value).expect("not 0")
}

fn plan(server: &Server) -> Plan {
    Plan {
        url: server.url(),
        model: None,
        endpoint: Endpoint::Completions,
        load: Load::Closed { streams: count(3) },
        requests: 12,
        warmup_requests: 0,
        prompts: Prompts::Synthetic(Synthetic { own_words: 5, shared_words: 0, groups: count(1) }),
        output_tokens: 4,
        ignore_eos: true,
        objectives: Objectives::default(),
        seed: 1,
        timeout: Duration::from_secs(30),
        api_key: None,
        headers: Vec::new(),
    }
}

async fn finish(plan: &Plan) -> (penstock_bench::Summary, Vec<penstock_bench::Record>) {
    run(plan, std::future::pending(), |_| ()).await.expect("a run")
}

/// Two events, of which the second carries three tokens: the server's count is taken, not the events'.
#[tokio::test]
async fn tokens_are_what_the_server_counts() {
    let server = Server::start(|_| Answer::tokens(&["a", " b c d"], 4)).await;
    let (summary, records) = finish(&plan(&server)).await;
    assert_eq!((summary.completed, summary.failed, summary.total_output_tokens), (12, 0, 48));
    assert_eq!((summary.total_input_tokens, summary.total_cached_tokens), (12 * 7, 12 * 2));
    assert_eq!(summary.output_tokens_from, "usage");
    assert_eq!(summary.model_id, "first-model");
    assert!(records.iter().all(|record| record.gaps_ms.len() == 1 && record.tpot_ms.is_some()));
    let gap = records[0].gaps_ms[0];
    let tpot = records[0].tpot_ms.expect("four tokens");
    assert!((tpot * 3.0 - gap).abs() < 1e-6, "three further tokens in one gap: {tpot} x 3 = {gap}");
}

#[tokio::test]
async fn without_usage_each_event_with_text_is_a_token() {
    let server = Server::start(|_| Answer::events(&["", "a", "b", ""])).await;
    let (summary, _) = finish(&plan(&server)).await;
    assert_eq!((summary.total_output_tokens, summary.output_tokens_from), (24, "events"));
}

#[tokio::test]
async fn a_closed_loop_keeps_its_streams_and_no_more() {
    let server = Server::start(|_| Answer::tokens(&["a"], 1).after(Duration::from_millis(15))).await;
    let (summary, _) = finish(&plan(&server)).await;
    assert_eq!(summary.completed, 12);
    assert_eq!(server.most_at_once(), 3);
}

#[tokio::test]
async fn an_open_loop_sends_in_order_and_keeps_its_cap() {
    let server = Server::start(|_| Answer::tokens(&["a"], 1).after(Duration::from_millis(20))).await;
    let mut plan = plan(&server);
    plan.load = Load::Open { per_second: 10_000.0, in_flight_max: count(4) };
    plan.requests = 20;
    let (summary, records) = finish(&plan).await;
    assert_eq!((summary.completed, server.most_at_once()), (20, 4));
    assert!(records.windows(2).all(|pair| pair[0].due_ms <= pair[1].due_ms && pair[0].sent_ms <= pair[1].sent_ms));
    // Sixteen of twenty waited for room, each for one of the four answers before it.
    assert!(summary.p99_sent_late_ms > 20.0, "{}", summary.p99_sent_late_ms);
}

#[tokio::test]
async fn each_way_to_fail_has_its_name() {
    let server = Server::start(|index| match index {
        0 => Answer::status(429, r#"{"error":{"message":"queue is full"}}"#),
        1 => Answer::status(503, "busy"),
        2 => Answer::status(400, r#"{"error":{"message":"max_tokens"}}"#),
        3 => Answer::events(&["a"]).cut(),
        4 => Answer::failing("replica lost"),
        5 => Answer::tokens(&["a"], 1).after(Duration::from_secs(60)),
        _ => Answer::tokens(&["a", "b"], 2),
    })
    .await;
    let mut plan = plan(&server);
    plan.load = Load::Closed { streams: count(1) };
    plan.requests = 8;
    plan.timeout = Duration::from_secs(4);
    plan.objectives = Objectives { ttft_ms: Some(1e9), tpot_ms: Some(1e9) };
    let (summary, records) = finish(&plan).await;
    let seen: Vec<_> = records.iter().map(|record| record.outcome).collect();
    let due = [
        Outcome::TooManyRequests,
        Outcome::Unavailable,
        Outcome::Refused,
        Outcome::Closed,
        Outcome::StreamError,
        Outcome::TimedOut,
        Outcome::Completed,
        Outcome::Completed,
    ];
    assert_eq!(seen, due);
    assert_eq!(records[0].message.as_deref(), Some("queue is full"));
    assert_eq!(records[1].message.as_deref(), Some("status 503"));
    assert_eq!(records[4].message.as_deref(), Some("replica lost"));
    assert_eq!((summary.completed, summary.failed, summary.total_output_tokens), (2, 6, 4));
    assert_eq!(summary.errors.values().sum::<usize>(), 6);
    // Failures stand in the denominator.
    assert_eq!(summary.slo_attainment, Some(2.0 / 8.0));
}

#[tokio::test]
async fn a_connection_that_ends_before_an_answer_is_tried_once_more() {
    let server = Server::start(|index| match index {
        1 | 3 | 4 => Answer::silent(),
        _ => Answer::tokens(&["a", "b"], 2),
    })
    .await;
    let mut plan = plan(&server);
    plan.load = Load::Closed { streams: count(1) };
    plan.requests = 4;
    let (_, records) = finish(&plan).await;
    let seen: Vec<_> = records.iter().map(|record| record.outcome).collect();
    assert_eq!(seen, [Outcome::Completed, Outcome::Completed, Outcome::Closed, Outcome::Completed]);
    let ids: Vec<_> = server.seen().iter().map(|seen| seen.header("x-request-id").map(str::to_owned)).collect();
    assert_eq!((ids.len(), &ids[1], &ids[3]), (6, &ids[2], &ids[4]), "one request sent twice each");
}

#[tokio::test]
async fn an_objective_that_none_meets_is_met_by_none() {
    let server = Server::start(|_| Answer::tokens(&["a", "b"], 2)).await;
    let mut plan = plan(&server);
    plan.objectives = Objectives { ttft_ms: Some(0.0), tpot_ms: None };
    let (summary, _) = finish(&plan).await;
    assert_eq!((summary.completed, summary.slo_attainment, summary.request_goodput), (12, Some(0.0), Some(0.0)));
    assert!(server.seen().iter().all(|seen| seen.header("x-slo-ttft-ms") == Some("0")));
}

#[tokio::test]
async fn what_is_sent_follows_from_the_seed() {
    let server = Server::start(|_| Answer::tokens(&["a"], 1)).await;
    let mut plan = plan(&server);
    plan.load = Load::Closed { streams: count(1) };
    plan.api_key = Some("secret".into());
    finish(&plan).await;
    finish(&plan).await;
    plan.seed = 2;
    finish(&plan).await;
    let seen = server.seen();
    let bodies: Vec<_> = seen.iter().map(|seen| seen.body.clone()).collect();
    assert_eq!(bodies[..12], bodies[12..24]);
    assert!(bodies[24..].iter().all(|body| !bodies[..24].contains(body)));
    let first: &Seen = &seen[0];
    assert_eq!(first.header("authorization"), Some("Bearer secret"));
    assert_eq!(first.header("x-request-id"), Some("bench-1-0"));
    assert_eq!(first.body["max_tokens"], 4);
    assert_eq!(first.body["ignore_eos"], true);
}

#[tokio::test]
async fn a_file_of_messages_is_asked_in_order_and_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("prompts.jsonl");
    let lines = "{\"messages\":[{\"role\":\"user\",\"content\":\"one\"}],\"max_tokens\":9}\n\n{\"prompt\":\"two\"}\n";
    std::fs::write(&path, lines).expect("written");
    let server = Server::start(|_| Answer::chat(&["a"])).await;
    let mut plan = plan(&server);
    plan.endpoint = Endpoint::Chat;
    plan.load = Load::Closed { streams: count(1) };
    plan.requests = 3;
    plan.prompts = Prompts::File(path);
    let (summary, _) = finish(&plan).await;
    assert_eq!((summary.completed, summary.total_output_tokens), (3, 3), "the role's event is no token");
    let asked: Vec<_> = server.seen().iter().map(|seen| seen.body["messages"][0]["content"].clone()).collect();
    assert_eq!(asked, ["one", "two", "one"]);
    assert_eq!(server.seen()[0].body["max_tokens"], 9);
    assert_eq!(server.seen()[1].body["max_tokens"], 4);
}

#[tokio::test]
async fn what_was_measured_before_a_stop_is_kept() {
    let server = Server::start(|index| match index {
        0..=4 => Answer::tokens(&["a"], 1),
        _ => Answer::tokens(&["a"], 1).after(Duration::from_secs(60)),
    })
    .await;
    let mut plan = plan(&server);
    plan.load = Load::Closed { streams: count(1) };
    let stop = server.asked(6);
    let (summary, records) = run(&plan, stop, |_| ()).await.expect("a run");
    assert!(summary.is_interrupted);
    assert_eq!((summary.completed, records.len()), (5, 5));
}

#[tokio::test]
async fn results_are_kept_and_hold_no_prompt_and_no_key() {
    let server = Server::start(|_| Answer::tokens(&["answer"], 1)).await;
    let mut plan = plan(&server);
    plan.api_key = Some("secret".into());
    let (summary, records) = finish(&plan).await;
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), &summary, &records).expect("saved");
    let lines = std::fs::read_to_string(folder.path().join("requests.jsonl")).expect("lines");
    let text = std::fs::read_to_string(folder.path().join("summary.json")).expect("a summary");
    assert_eq!(lines.lines().count(), 12);
    let kept: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for key in [
        "completed",
        "failed",
        "request_throughput",
        "output_throughput",
        "mean_ttft_ms",
        "p99_tpot_ms",
        "median_itl_ms",
        "p95_e2el_ms",
        "std_ttft_ms",
    ] {
        assert!(kept.get(key).is_some_and(serde_json::Value::is_number), "{key}");
    }
    let prompt = server.seen()[0].body["prompt"].as_str().expect("a text").to_owned();
    for secret in ["secret", "answer", prompt.as_str()] {
        assert!(!lines.contains(secret) && !text.contains(secret), "{secret}");
    }
}

#[tokio::test]
async fn a_run_that_cannot_begin_says_what_to_do() {
    let server = Server::start(|_| Answer::tokens(&["a"], 1)).await;
    let url = server.url();
    let mut plan = plan(&server);
    drop(server);
    let said =
        |plan: Plan| async move { run(&plan, std::future::pending(), |_| ()).await.map(|_| ()).expect_err("refused") };
    let refused = said(plan.clone()).await;
    assert!(matches!(&refused, BenchError::Unreachable { .. }), "{refused}");
    assert!(refused.to_string().contains(&url) && refused.to_string().contains("penstock serve"));
    plan.requests = 0;
    assert!(matches!(said(plan.clone()).await, BenchError::Plan { flag: "--requests", .. }));
    plan.requests = 1;
    plan.load = Load::Open { per_second: 0.0, in_flight_max: count(1) };
    assert!(matches!(said(plan.clone()).await, BenchError::Plan { flag: "--rate", .. }));
    plan.load = Load::Closed { streams: count(1) };
    plan.prompts = Prompts::File(PathBuf::from("no-such-file"));
    assert!(matches!(said(plan).await, BenchError::Prompts { line: None, .. }));
}
