"""Who may do what: keys, quotas, classes, and what one tenant can see of another (nothing)."""

import asyncio
import statistics
import time

import httpx
import openai
import pytest
from openai import OpenAI

from keys import bearer, key_file
from server import MODEL_NAME, Server
from wire import post_bytes

CROWD = 10_000
# 150 blocks of 16 tokens hold one long answer at a time and no second one beside it.
KV_BLOCKS = 150
LONG_TOKENS = 2_000


def crowd_key(at):
    return f"sk-crowd-{at}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A server with 10,000 tenants and a few with special terms."""
    special = [
        ("plain", "sk-plain", {}),
        ("off", "sk-off", {"disabled": True}),
        ("poor", "sk-poor", {"tokens_per_window_max": 60}),
        ("single", "sk-single", {"requests_max": 1}),
        ("low", "sk-low", {"class_ceiling": 1}),
        ("high", "sk-high", {"class_ceiling": 6}),
        ("ann", "sk-ann", {"trust_group": "family"}),
        ("bob", "sk-bob", {"trust_group": "family"}),
        ("eve", "sk-eve", {}),
        ("forgetful", "sk-forgetful", {"no_store": True}),
    ]
    crowd = [(f"tenant-{at}", crowd_key(at), {}) for at in range(CROWD)]
    config = {
        "objectives": {"gold": {"class": 7}},
        "limits": {"quota_window_ms": 3_600_000},
        "policy": {"overload_tick_ms": 100},
    }
    folder = tmp_path_factory.mktemp("shop")
    server = Server(folder, "--kv-blocks", KV_BLOCKS, config=config, keys=key_file(*special, *crowd))
    yield server
    server.stop()


def client(shop, key):
    return OpenAI(base_url=f"{shop.url}/v1", api_key=key, max_retries=0, timeout=60)


def complete(shop, key, prompt="Hello", **options):
    options = {"model": MODEL_NAME, "max_tokens": 1, "temperature": 0, **options}
    return client(shop, key).completions.create(prompt=prompt, **options)


def test_only_known_keys_are_let_in(shop):
    assert complete(shop, "sk-plain").usage.completion_tokens == 1
    with pytest.raises(openai.AuthenticationError) as unknown:
        complete(shop, "sk-nobody")
    assert (unknown.value.code, unknown.value.type) == ("invalid_api_key", "authentication_error")
    assert unknown.value.response.headers["www-authenticate"] == "Bearer"
    missing = httpx.post(f"{shop.url}/v1/completions", json={"model": MODEL_NAME, "prompt": "x"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (401, "missing_api_key")
    with pytest.raises(openai.PermissionDeniedError) as disabled:
        complete(shop, "sk-off")
    assert disabled.value.code == "tenant_disabled"
    for path in ("/v1/models", f"/v1/models/{MODEL_NAME}"):
        assert httpx.get(shop.url + path).status_code == 401
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(shop.url + path, json={"prompt": "x", "tokens": [1]}).status_code == 401


def test_a_used_up_quota_is_a_429_that_says_when_to_come_back(shop):
    complete(shop, "sk-poor", "one two three", max_tokens=20, extra_body={"ignore_eos": True})
    complete(shop, "sk-poor", "one two three", max_tokens=20, extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError) as refused:
        complete(shop, "sk-poor", "one two three", max_tokens=20)
    headers = refused.value.response.headers
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-llm-d-request-dropped-reason"] == "rate_limit_exceeded"
    assert complete(shop, "sk-plain"), "another tenant's quota is untouched"


def test_a_tenant_has_no_more_requests_at_once_than_its_terms_allow(shop):
    first = complete(shop, "sk-single", max_tokens=LONG_TOKENS, stream=True, extra_body={"ignore_eos": True})
    next(first)
    with pytest.raises(openai.RateLimitError) as refused:
        complete(shop, "sk-single")
    assert refused.value.response.headers["x-llm-d-request-dropped-reason"] == refused.value.code
    first.response.close()
    shop.wait_until_idle()
    complete(shop, "sk-single")


async def start_long(shop, key, name, started, leave):
    """Streams a long answer, says when its first token came, and leaves when told."""
    body = {"model": MODEL_NAME, "prompt": f"{name}:", "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    headers = {**bearer(key), "x-llm-d-inference-objective": "gold"}
    async with httpx.AsyncClient(base_url=shop.url, timeout=60) as http:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            # Kept: a reader that is let go closes the stream.
            lines = response.aiter_lines()
            await lines.__anext__()
            started.append(name)
            await leave.wait()


def test_a_class_asked_for_is_clamped_to_the_tenants_ceiling(shop):
    """All three ask for the highest class, and the pool holds one at a time: the one with the higher ceiling goes first although it came last."""

    async def scene():
        started, leave = [], [asyncio.Event() for _ in range(3)]

        async def until(condition):
            deadline = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < deadline, (started, shop.metrics().busy())
                await asyncio.sleep(0.02)

        async def join(key, name, event):
            return asyncio.create_task(start_long(shop, key, name, started, event))

        tasks = [await join("sk-plain", "holder", leave[0])]
        await until(lambda: started == ["holder"])
        waiting = "vllm:num_requests_waiting"
        tasks.append(await join("sk-low", "low", leave[1]))
        await until(lambda: shop.metrics().sum(waiting) == 1)
        tasks.append(await join("sk-high", "high", leave[2]))
        await until(lambda: shop.metrics().sum(waiting) == 2)
        leave[0].set()
        await until(lambda: len(started) == 2)
        leave[2].set()
        await until(lambda: len(started) == 3)
        leave[1].set()
        await asyncio.gather(*tasks)
        return started

    assert asyncio.run(scene()) == ["holder", "high", "low"]
    shop.wait_until_idle()


def story(number):
    """About 100 tokens that differ from each other from the first one on."""
    return f"{number} " + "chapters tell of the sea and of the wind over the sea. " * 8


def cached(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_cached_prompt_is_seen_by_its_own_trust_group_only(shop):
    hits = "vllm:prefix_cache_hits_total"
    assert cached(complete(shop, "sk-ann", story(1))) == 0
    assert cached(complete(shop, "sk-ann", story(1))) > 0
    assert cached(complete(shop, "sk-bob", story(1))) > 0, "the same group"
    before = shop.metrics()
    answer = complete(shop, "sk-eve", story(1))
    after = shop.metrics()
    assert cached(answer) == 0
    assert after.sum(hits) == before.sum(hits)
    prefilled = "penstock_step_prefill_tokens_sum"
    assert after.sum(prefilled) - before.sum(prefilled) == answer.usage.prompt_tokens, "every token was computed anew"
    # A salt that the client chooses opens no door.
    salted = complete(shop, "sk-plain", story(1), extra_body={"cache_salt": "family"})
    assert cached(salted) == 0


def test_a_tenant_that_wants_nothing_kept_leaves_nothing(shop):
    assert cached(complete(shop, "sk-forgetful", story(2))) == 0
    assert cached(complete(shop, "sk-forgetful", story(2))) == 0
    body = {"penstock": {"no_store": True}}
    assert cached(complete(shop, "sk-plain", story(3), extra_body=body)) == 0
    assert cached(complete(shop, "sk-plain", story(3))) == 0


def test_another_groups_cache_shows_in_no_time_either(shop, figure):
    times = {"own": [], "others": [], "nobodys": []}

    def timed(kind, prompt):
        start = time.perf_counter()
        answer = complete(shop, "sk-eve", prompt)
        times[kind].append(1000 * (time.perf_counter() - start))
        return cached(answer)

    for number in range(100, 115):
        complete(shop, "sk-ann", story(number))
        cold = [("others", story(number)), ("nobodys", story(number + 500))]
        # Neither is always the first.
        for kind, prompt in cold if number % 2 else reversed(cold):
            assert timed(kind, prompt) == 0
        assert timed("own", story(number)) > 0
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    figure(
        f"prompt of about 100 tokens, median of 15: cached by another trust group {medians['others']:.1f} ms, "
        f"cached by nobody {medians['nobodys']:.1f} ms, cached by oneself {medians['own']:.1f} ms"
    )


async def send_crowd(port, links):
    """One request of one token for each tenant, over `links` connections that are kept alive."""
    statuses = {}
    queue = iter(range(CROWD))

    async def worker():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in queue:
            body = {"model": MODEL_NAME, "prompt": [100 + at % 7], "max_tokens": 1, "temperature": 0}
            writer.write(post_bytes("/v1/completions", body, key=crowd_key(at)))
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            statuses[status] = statuses.get(status, 0) + 1
        writer.close()

    await asyncio.gather(*(worker() for _ in range(links)))
    return statuses


def test_ten_thousand_tenants_do_not_grow_the_metrics(shop, figure):
    complete(shop, "sk-plain")
    before = shop.metrics()
    start = time.perf_counter()
    statuses = asyncio.run(send_crowd(shop.port, 64))
    seconds = time.perf_counter() - start
    assert statuses == {200: CROWD}
    after = shop.metrics()
    assert set(after.series) == set(before.series), "no series is added by a tenant"
    assert not any("tenant-" in key or "crowd" in key for key in after.series)
    shop.wait_until_idle()
    figure(
        f"{CROWD} tenants with one request each: {CROWD / seconds:.0f} requests/s, {len(after.series)} series in "
        f"/metrics, resident memory {shop.rss_kib() / 1024:.0f} MiB"
    )
