"""Greedy and seeded outputs of this checkout and another, offline and over HTTP.

Run ``python -m benchmarks.same_outputs CHECKOUT``. Both checkouts need a built native library. Each runs in its
own processes, with the zoo's target, with and without drafts. The command fails if a text, a finish reason or a
log-probability differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import DOMAINS, ROOT, prompts, write

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 12},
    {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.2, "seed": 13},
)
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "off"},
    {"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": 4},
    {"method": "ngram", "num_speculative_tokens": 4},
)
TOKENS = 48
OFFLINE = """
import json, sys
from cospec import LLM, SamplingParams
given = json.load(sys.stdin)
found = []
for method in given["methods"]:
    with LLM("zoo", method) as llm:
        for params in given["params"]:
            answers = llm.generate(given["prompts"], SamplingParams(max_tokens=given["tokens"], logprobs=2, **params))
            for answer in answers:
                out = answer.outputs[0]
                found.append([out.text, list(out.token_ids), str(out.finish_reason), [l.logprob for l in out.logprobs]])
print("RESULT" + json.dumps(found))
"""


def environment(checkout: Path) -> dict[str, str]:
    """Variables with which Python imports cospec from ``checkout``."""
    return os.environ | {"PYTHONPATH": str(checkout / "src")}


def commit(checkout: Path) -> str:
    """Return the short hash of a checkout's commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def named(checkout: Path) -> list[str]:
    """Return the command line with the word CHECKOUT in place of a path of this machine."""
    return ["CHECKOUT" if each == str(checkout) else each for each in sys.argv]


def offline(checkout: Path, texts: list[str]) -> list[Any]:
    """Text, token ids, finish reason and log-probabilities of every output of ``LLM.generate``."""
    given = {"methods": METHODS, "params": PARAMS, "prompts": texts, "tokens": TOKENS}
    command = [sys.executable, "-c", OFFLINE]
    done = subprocess.run(
        command, input=json.dumps(given), env=environment(checkout), cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[Any] = json.loads(done.stdout.rsplit("RESULT", 1)[1])
    return found


@contextmanager
def server(checkout: Path, method: dict[str, Any], port: int, variables: Mapping[str, str] = {}) -> Iterator[str]:
    """The URL of a server of ``checkout``, started with more environment variables."""
    command = [sys.executable, "-m", "cospec", "serve", "zoo", "--port", str(port)]
    command += ["--speculative-config", json.dumps(method)]
    process = subprocess.Popen(
        command,
        env={**environment(checkout), **variables},
        cwd=checkout,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"the server of {checkout} ended")

            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def over_http(checkout: Path, texts: list[str], port: int) -> list[Any]:
    """Choices of every call to ``/v1/completions``."""
    found = []
    for method in METHODS:
        with server(checkout, method, port) as url:
            for params in PARAMS:
                body = {"prompt": texts, "max_tokens": TOKENS, "logprobs": 2, **params}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
                answer.raise_for_status()
                found.append([[c["text"], c["finish_reason"], c["logprobs"]] for c in answer.json()["choices"]])
    return found


def main() -> None:
    """Compare, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="the other checkout, with a built native library")
    parser.add_argument("--prompts", type=int, default=6, help="of each domain")
    parser.add_argument("--port", type=int, default=18473)
    options = parser.parse_args()
    texts = [text[:400] for domain in DOMAINS for text in prompts(domain, options.prompts)]
    result = {}
    for name, run in (("offline", offline), ("http", lambda root, texts: over_http(root, texts, options.port))):
        ours, theirs = run(ROOT, texts), run(options.checkout.resolve(), texts)
        same = sum(one == other for one, other in zip(ours, theirs, strict=True))
        result[name] = {"compared": len(ours), "equal": same}
        print(f"{name}: {same} of {len(ours)} equal", flush=True)
    print("written to", write("same_outputs", {"rows": [{"mode": name, **row} for name, row in result.items()]}))
    if any(row["equal"] != row["compared"] for row in result.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
