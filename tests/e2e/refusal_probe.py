"""A program of its own, so that nothing beside it slows its clock: how long does a refusal take, from the last byte sent to the answer?

Usage: refusal_probe.py PORT KEY COUNT PAUSE_MS. Prints the times in microseconds as JSON; every answer must be a 429.
"""

import json
import sys
import time

from wire import connect, post_bytes


def main():
    port, key, count, pause_ms = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    request = post_bytes("/v1/completions", {"model": "demo", "prompt": "One two three four", "max_tokens": 8}, key=key)
    times = []
    with connect(port) as link:
        for _ in range(count):
            start = time.perf_counter_ns()
            link.sendall(request)
            answer = link.recv(65536)
            times.append((time.perf_counter_ns() - start) // 1000)
            assert answer.startswith(b"HTTP/1.1 429"), answer[:200]
            while not answer.endswith(b"}}"):
                answer += link.recv(65536)
            time.sleep(pause_ms / 1000)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
