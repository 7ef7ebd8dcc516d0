//! A summary for a terminal.

use std::fmt::Write as _;

use crate::statistics::Statistics;
use crate::summary::Summary;

/// One page, at most 100 columns wide.
#[must_use]
pub fn table(summary: &Summary) -> String {
    let mut page = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(page, "{name:<22} {value}");
    };
    row("model", format!("{} at {}", summary.model_id, summary.base_url));
    let rate = summary.request_rate.as_f64().map_or_else(
        || format!("{} streams", summary.max_concurrency),
        |rate| format!("{rate} requests/s, at most {} in flight", summary.max_concurrency),
    );
    row("load", format!("{rate}, seed {}", summary.seed));
    let cut = if summary.is_interrupted { ", interrupted" } else { "" };
    row(
        "requests",
        format!("{} completed, {} failed in {:.1} s{cut}", summary.completed, summary.failed, summary.duration),
    );
    for (kind, count) in &summary.errors {
        row("", format!("{count} {kind}"));
    }
    row(
        "tokens",
        format!(
            "{} in ({} cached), {} out, counted by {}",
            summary.total_input_tokens,
            summary.total_cached_tokens,
            summary.total_output_tokens,
            if summary.output_tokens_from == "usage" { "the server" } else { "events" },
        ),
    );
    row("output tok/s", format!("{:.1}", summary.output_throughput));
    row("total tok/s", format!("{:.1}", summary.total_token_throughput));
    row("requests/s", format!("{:.2}", summary.request_throughput));
    if let (Some(goodput), Some(attainment)) = (summary.request_goodput, summary.slo_attainment) {
        row("goodput, requests/s", format!("{goodput:.2} ({:.1} % met all objectives)", attainment * 100.0));
    }
    row("sent late, p99", format!("{:.1} ms", summary.p99_sent_late_ms));
    row("", format!("{:>10} {:>10} {:>10} {:>10} {:>10}", "mean", "p50", "p90", "p95", "p99"));
    let times = &summary.times;
    row("TTFT, ms", times_row(times.ttft));
    row("TPOT, ms", times_row(times.tpot));
    row("ITL, ms", times_row(times.itl));
    row("end to end, ms", times_row(times.e2el));
    page
}

fn times_row(seen: Statistics) -> String {
    let [p50, p90, p95, p99] = seen.percentiles;
    [seen.mean, p50, p90, p95, p99].map(|value| format!("{value:>10.1}")).join(" ")
}
