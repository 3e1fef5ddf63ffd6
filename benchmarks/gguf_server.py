"""cospec and llama.cpp as servers on the same GGUF files, each with and without the same draft model.

Run ``python -m benchmarks.gguf_server LLAMA_SERVER``; ``other_servers.sh`` builds the program ``llama-server``. Target
and draft model follow tables of next tokens (``gguf_files``), so both servers verify real drafts with the same
acceptance: a draft token is right with the probability ``--right``, given right tokens before. Both draft
``--tokens-per-draft`` tokens. The answers show the acceptance of each server, and whether all answers are equal. The
servers take turns with the same prompts, over ``/v1/completions``, in random order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import ROOT, write
from benchmarks.gguf_files import MODELS, TYPES, WORDS, Model, one_cycle, with_errors, write_file
from benchmarks.same_outputs import environment
from cospec.bench.counters import from_prometheus
from cospec.bench.paired_ratios import paired_ratio
from cospec.native import operators

SYSTEMS = ("llama.cpp, off", "llama.cpp, draft", "cospec, off", "cospec, draft")
RATIOS = {
    "with_drafts": (SYSTEMS[1], SYSTEMS[3]),
    "without_drafts": (SYSTEMS[0], SYSTEMS[2]),
    "cospec_gain": (SYSTEMS[2], SYSTEMS[3]),
}
DRAFTS: dict[str, Callable[[Model], Model]] = {
    "tiny": lambda model: replace(model, name="tiny", layers=2, hidden=256, inner=512, heads=4, kv_heads=2),
    "family": lambda model: replace(model, name="family", layers=4),
}
"""Draft models of a target: a cheap one, and one of the target's width."""
PAUSE = 0.3  # seconds before each turn; waiting threads of the last server stop spinning
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What a server did in one turn: seconds, texts, and numbers of draft tokens and of accepted ones."""

    seconds: float
    texts: tuple[str, ...]
    drafted: int
    accepted: int


class Server(ABC):
    """A running server; its subclasses know where the counters of drafts are."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=600)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
        """Send all prompts at the same time, and wait for the last answer."""
        time.sleep(PAUSE)
        before, started = self.drafts([]), time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = list(threads.map(lambda prompt: self._complete(prompt, tokens), prompts))
        seconds, after = time.perf_counter() - started, self.drafts(found)
        texts = tuple(each["choices"][0]["text"] for each in found)
        return Answers(seconds, texts, *(new - old for new, old in zip(after, before, strict=True)))

    @abstractmethod
    def drafts(self, answers: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Return the numbers of draft tokens and accepted tokens, up to and including ``answers``."""

    def _complete(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        if found["usage"]["completion_tokens"] != tokens:
            raise RuntimeError(f"a server answered with {found['usage']['completion_tokens']} tokens, not {tokens}")
        return found


class Cospec(Server):
    """Counts drafts of all requests on its metrics page."""

    def drafts(self, answers: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """See ``Server``."""
        sample = from_prometheus(self.client.get("/metrics").text)
        assert sample is not None
        return sample.counters.draft_tokens, sample.counters.accepted_tokens


class LlamaCpp(Server):
    """Counts drafts of a request in its answer."""

    def drafts(self, answers: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """See ``Server``."""
        timings = [each["timings"] for each in answers]
        drafted, accepted = ([each.get(name, 0) for each in timings] for name in ("draft_n", "draft_n_accepted"))
        return sum(drafted), sum(accepted)


def commands(options: argparse.Namespace, target: Path, draft: Path) -> dict[str, list[str]]:
    """Return the command of each server, without its port."""
    k, threads = str(options.tokens_per_draft), str(operators.threads())
    slots = max(options.requests)
    length = options.prompt_tokens + options.output_tokens + options.tokens_per_draft + 64
    theirs = [str(options.binary), "-m", str(target), "-t", threads, "-np", str(slots), "--no-cache-prompt"]
    theirs += ["-c", str(slots * length)]
    ours = [sys.executable, "-m", "cospec", "serve", str(target), "--threads", threads, "--no-enable-prefix-caching"]
    chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": options.tokens_per_draft}
    drafting = ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", k]
    return dict(
        zip(
            SYSTEMS,
            (
                theirs,
                [*theirs, *drafting],
                [*ours, "--speculative-config", json.dumps({"method": "off"})],
                [*ours, "--speculative-config", json.dumps(chosen)],
            ),
            strict=True,
        )
    )


@contextmanager
def served(name: str, command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    """Start a server, and wait until its model is loaded."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=ROOT, env=environment(ROOT), stdout=output, stderr=output
        )
    server = (LlamaCpp if name.startswith("llama") else Cospec)(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + START_SECONDS
        while not healthy(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} has not started; {log} has its messages.")
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait()


def healthy(server: Server) -> bool:
    """Return whether the server answers that requests can be sent."""
    try:
        return server.client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def measure(servers: dict[str, Server], model: Model, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per number of requests; the first turn warms up."""
    shuffler, rows = random.Random(0), []
    for requests in options.requests:
        turns = list[dict[str, Answers]]()
        for _ in range(options.turns + 1):
            prompts = [
                [shuffler.randrange(WORDS, model.vocabulary) for _ in range(options.prompt_tokens)]
                for _ in range(requests)
            ]
            order = shuffler.sample(SYSTEMS, len(SYSTEMS))
            turns.append({name: servers[name].ask(prompts, options.output_tokens) for name in order})
        rows.append({"requests": requests, **figures(turns[1:], requests * options.output_tokens)})
    return rows


def figures(turns: Sequence[dict[str, Answers]], tokens: int) -> dict[str, Any]:
    """Return tokens per second and acceptance of each system, and ratios of times within a turn."""
    seconds = {name: [turn[name].seconds for turn in turns] for name in SYSTEMS}
    accepted = {}
    for name in SYSTEMS:
        drafted = sum(turn[name].drafted for turn in turns)
        accepted[name] = sum(turn[name].accepted for turn in turns) / drafted if drafted else None
    return {
        "tokens_per_second": {name: tokens / statistics.median(own) for name, own in seconds.items()},
        "accepted_of_drafted": accepted,
        "same_text": statistics.mean(len({turn[name].texts for name in SYSTEMS}) == 1 for turn in turns),
        **{key: paired_ratio(seconds[slow], seconds[fast]).as_json() for key, (slow, fast) in RATIOS.items()},
    }


def compare(kind: str, size: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write target and draft model, start all servers, measure, and print each row."""
    model = MODELS[options.model]
    small = DRAFTS[size](model)
    other = next(each for each in ("q8_0", "q4_0") if each != kind)
    target, draft = (
        options.folder / f"{model.name}-{kind}-cycle.gguf",
        options.folder / f"{model.name}-{small.name}-{other}.gguf",
    )
    successors = one_cycle(model.vocabulary)
    write_file(target, model, kind, successors)
    write_file(draft, small, other, with_errors(successors, options.right))
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(served(name, command, options.port + place, options.folder / f"{place}.log"))
            for place, (name, command) in enumerate(commands(options, target, draft).items())
        }
        rows = measure(servers, model, options)
    for file in (target, draft):
        file.unlink()
    for row in rows:
        ratios = (f"{key} {{ratio:.2f}} ({{low:.2f}} to {{high:.2f}})".format(**row[key]) for key in RATIOS)
        print(model.name, kind, size, row["requests"], *ratios, row["tokens_per_second"], flush=True)
        yield {"target": kind, "draft": f"{size} {other}", **row}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="llama-server")
    parser.add_argument("--folder", type=Path, default=Path("runs/gguf-server"), help="of files and logs")
    parser.add_argument("--model", choices=MODELS, default="Qwen2.5-0.5B")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["q4_0", "q8_0"], help="of the target")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--right", type=float, default=0.7, help="probability of a right draft token")
    parser.add_argument("--tokens-per-draft", type=int, default=4)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8], help="at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--port", type=int, default=18560)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sys.argv = ["llama-server" if each == str(options.binary) else each for each in sys.argv]
    settings = {name: value for name, value in vars(options).items() if name not in {"binary", "folder"}}
    for kind in options.types:
        rows = [row for size in options.drafts for row in compare(kind, size, options)]
        result = f"gguf_server_{options.model.lower()}_{kind}_{operators.isa()}"
        print("written to", write(result, {"options": settings, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
