"""What an operator asks for: models, tokens, health, metrics, keys, drains, and clients that go away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import cospec
from cospec.server.run import bind
from harness.waiting import until

if TYPE_CHECKING:
    from server.conftest import Running


def active(server: Running) -> int:
    return server.run(lambda: server.client.active)


def engine_running(server: Running) -> float:
    return samples(server)["cospec:num_requests_running"]


def samples(server: Running) -> dict[str, float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_models(server: Running) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 256)
    assert server.http.get("/v1/models/fake").json() == card


def test_tokenize_and_detokenize(server: Running) -> None:
    found = server.post("/tokenize", prompt="héllo", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 6
    assert found["max_model_len"] == 256
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "héllo"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert server.post("/detokenize", tokens=chat["tokens"]).json() == {"prompt": "u: x\na:"}
    assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_tokenize_refuses(server: Running, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, **body).status_code == 400


def test_health_ready_version_docs(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 200
    assert server.http.get("/version").json() == {"version": cospec.__version__}
    paths = server.http.get("/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["properties"]


def test_metrics_have_vllm_names(server: Running) -> None:
    server.post("/v1/completions", prompt="ab", max_tokens=6)
    text = server.http.get("/metrics").text
    found = {family.name for family in text_string_to_metric_families(text)}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
        "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "e2e_request_latency_seconds", "step_seconds",
    ):  # fmt: skip
        assert f"cospec:{name}" in found, name
    labels = 'drafter="fake",model_name="fake",position="1"'
    assert any(
        line.startswith("cospec:spec_decode_num_accepted_tokens_per_pos_total") and line.endswith(" 2.0")
        and all(label in line for label in labels.split(","))
        for line in text.splitlines()
    )  # fmt: skip


def test_metrics_tell_how_requests_ran(server: Running) -> None:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    found = {(s.name, s.labels.get("reason")): s.value for family in families for s in family.samples}
    assert found["cospec:native_requests_total", None] == 7.0
    assert found["cospec:python_path_requests_total", "logprobs"] == 2.0


def test_drafter_nodes_are_listed_and_counted(server: Running) -> None:
    first, second = server.http.get("/cluster").json()["nodes"]
    assert first == second
    assert (first["node"], first["state"], first["weight"], first["draft_acceptance_rate"]) == (
        "small",
        "ready",
        0.25,
        5 / 9,
    )
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    found = {(s.name, s.labels.get("node"), s.labels.get("state")): s.value for each in families for s in each.samples}
    assert found["cospec:drafter_node_state", "small", "ready"] == 2.0
    assert found["cospec:drafter_node_late_total", "small", None] == 6.0, "the counters are those of the totals"
    assert found["cospec:drafter_node_cost_per_hour", "small", None] == 1.0


@pytest.mark.parametrize(("stream", "later"), [(False, 5), (True, 4)])  # of six tokens; of a stream's two come first
def test_latencies_are_counted_per_token(server: Running, stream: bool, later: int) -> None:
    before = samples(server)
    server.post("/v1/completions", prompt="ab", max_tokens=6, temperature=0, stream=stream)
    after = samples(server)

    def gained(name: str) -> float:
        return after[f"cospec:{name}_count"] - before.get(f"cospec:{name}_count", 0)

    assert gained("time_to_first_token_seconds") == 1
    assert gained("inter_token_latency_seconds") == later
    assert gained("e2e_request_latency_seconds") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_its_requests(server: Running, stream: bool) -> None:
    body = {"prompt": "FOREVER", "n": 20, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # kept: dropping it would close the connection
                next(lines)
                assert engine_running(server) == 20
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.3)
    # Left alone they would run forever.
    until(lambda: engine_running(server) == 0)
    assert active(server) == 0
    text = server.http.get("/metrics").text
    aborted = next(line for line in text.splitlines() if "request_success_total" in line and '"abort"' in line)
    assert float(aborted.rsplit(" ", 1)[1]) >= 20


def test_key_is_asked_for(own_server: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = httpx.get(f"{own_server.url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.post(f"{own_server.url}/tokenize", json={"prompt": "a"}, headers=headers).status_code == 401
        assert httpx.get(f"{own_server.url}/cluster", headers=headers).status_code == 401
        assert httpx.get(f"{own_server.url}/health", headers=headers).status_code == 200
    assert own_server.http.get("/v1/models").status_code == 200


def test_drain_finishes_what_runs_and_refuses_what_comes(own_server: Running) -> None:
    import asyncio

    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(own_server.post, "/v1/completions", prompt="SLOW", max_tokens=100)
        until(lambda: active(own_server) == 1)
        drain = asyncio.run_coroutine_threadsafe(own_server.client.drain(30), own_server.loop)
        until(lambda: own_server.http.get("/ready").status_code == 503)
        refused = own_server.post("/v1/completions", prompt="a")
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        assert own_server.http.get("/health").status_code == 200
        drain.result(30)
        assert running.result().json()["usage"]["completion_tokens"] == 100


def test_drain_that_takes_too_long_ends_the_rest(own_server: Running) -> None:
    import asyncio

    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(own_server.post, "/v1/completions", prompt="FOREVER")
        until(lambda: active(own_server) == 1)
        asyncio.run_coroutine_threadsafe(own_server.client.drain(0.05), own_server.loop).result(30)
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"
        assert engine_running(own_server) == 0


def test_every_answer_has_a_request_id(server: Running) -> None:
    body = {"prompt": "ab", "max_tokens": 2}
    answer = server.post("/v1/completions", **body)
    assert answer.headers["x-request-id"] == answer.json()["id"]
    streamed = server.post("/v1/completions", **body, stream=True)
    assert streamed.headers["x-request-id"] == json.loads(streamed.text.splitlines()[0].removeprefix("data: "))["id"]
    first, second = (server.http.get("/nothing").headers["x-request-id"] for _ in range(2))
    assert first != second
    for given, kept in (("mine-7", True), ("x" * 200, False), ("a b", False)):
        answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": given})
        assert (answer.headers.get_list("x-request-id") == [given]) is kept


def test_health_answers_head(server: Running) -> None:
    for path in ("/health", "/ready"):
        assert server.http.head(path).status_code == 200


def test_connections_send_what_they_have_at_once() -> None:
    """Otherwise the second part of an answer waits for the client to acknowledge the first: 40 ms."""

    async def no_delay() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(met, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await seen
            writer.close()
            return found

    assert asyncio.run(no_delay())
