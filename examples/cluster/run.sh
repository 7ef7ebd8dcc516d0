#!/usr/bin/env bash
# A small cluster on this machine: a gateway, a worker that prefills, one that decodes. Sends a request, shows who did what, ends all in order.
#
#   cargo xtask serve -- --help >/dev/null      once: builds the binary and fetches the demo model
#   examples/cluster/run.sh                     workers are found in a folder
#   ETCD=http://127.0.0.1:2379 examples/cluster/run.sh      ... or in an etcd that runs
#   KEEP=1 examples/cluster/run.sh              stays up until Ctrl-C
#
# PENSTOCK names another binary, MODEL another model, PORT the gateway's port.
set -euo pipefail
cd "$(dirname "$0")/../.."

penstock=${PENSTOCK:-target/ci/penstock}
model=${MODEL:-demo}
port=${PORT:-8000}
[ -x "$penstock" ] || { echo "no binary at $penstock: build one with \`cargo xtask serve -- --help\`, or name it in PENSTOCK" >&2; exit 1; }

folder=$(mktemp -d)
mkdir "$folder/workers"
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$folder/token")
# Prompts as short as the one below are handed off as well.
printf '[replicas]\nhandoff_tokens_min = 16\n' > "$folder/penstock.toml"
discovery=${ETCD:+etcd:$ETCD}
common=(--config "$folder/penstock.toml" --model "$model" --served-model-name demo --token-file "$folder/token"
    --discovery "${discovery:-folder:$folder/workers}" --policies native --admin-listen off)

pids=()
finish() {
    code=$?
    trap - EXIT INT TERM
    # The gateway first: it lets its streams finish while the workers are still there.
    for (( i = ${#pids[@]} - 1; i >= 0; i-- )); do
        kill -TERM "${pids[i]}" 2>/dev/null || true
        wait "${pids[i]}" || code=$?
    done
    if [ "$code" = 0 ]; then
        grep -h 'drain: ' "$folder"/*.log | sed 's/^[^ ]* *//; s/^/  /'
        rm -r "$folder"
        echo "ended in order"
    else
        echo "something went wrong; the logs are in $folder" >&2
    fi
    exit "$code"
}
trap finish EXIT
trap 'exit 0' INT TERM

start() {
    local name=$1
    shift
    "$penstock" "$@" "${common[@]}" > "$folder/$name.log" 2>&1 &
    pids+=($!)
}

until_healthy() {
    for _ in $(seq 600); do
        if curl -fs -o /dev/null "http://127.0.0.1:$port/health"; then return; fi
        for pid in "${pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || { echo "a process has ended by itself:" >&2; tail -n 3 "$folder"/*.log >&2; exit 1; }
        done
        sleep 0.2
    done
    echo "the gateway is not ready" >&2
    exit 1
}

start prefill worker --name prefill --role prefill --listen 127.0.0.1:0 --control-listen 127.0.0.1:0 --kv-blocks 600 --threads 1
start decode worker --name decode --role decode --listen 127.0.0.1:0 --control-listen 127.0.0.1:0 --kv-blocks 600 --threads 1
start gateway gateway --name gateway --listen "127.0.0.1:$port"
echo "waiting for the gateway and its workers; their logs are in $folder"
until_healthy

ask='{"model": "demo", "temperature": 0, "max_tokens": 24, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
curl -fsS "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d "$ask"
echo
grep -h 'worker has joined' "$folder/gateway.log" | sed 's/^[^ ]* *//; s/^/  /'
curl -fsS "http://127.0.0.1:$port/metrics" | grep '^penstock_handoffs_total' | sed 's/^/  /'
grep -h 'KV goes to' "$folder"/*.log | sed 's/^[^ ]* *//; s/^/  /' || true
if [ -n "${KEEP:-}" ]; then
    echo "http://127.0.0.1:$port answers until Ctrl-C"
    while true; do
        for pid in "${pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || { echo "process $pid has ended by itself; see $folder" >&2; exit 1; }
        done
        sleep 1
    done
fi
