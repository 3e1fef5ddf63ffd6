"""Measures decentralized speculative decoding (DSD) over real processes, and compares with the paper's equations.

Run ``python -m benchmarks.dsd``. Each node is a process with its layers of a random Llama of eight layers. Links
between nodes have injected delays. Nodes and links sleep, so two cores can stand for eight nodes: each node takes
``--stage`` seconds for a window of any length, as a processor that waits for its memory does. The drafter replays
stored outputs with mistakes, at the acceptance of the paper's table 1, and sleeps its own time too.
With ``--namespaces`` each node runs in a network namespace of ``benchmarks.netns``, whose links take real time.

With ``--ahead`` one request has as many windows in flight as nodes (mode ``draft-ahead``), with and without early exit.

The slowest links that the paper names, over hundreds of tokens (half an hour): ``python -m benchmarks.dsd --nodes 4 8
--ratios 24 32 --tokens 320 --plain-tokens 24 --stage 0.01 --repeats 1 --alone --name dsd_regime_long``.

``t0`` is the time of a one-token step of the whole pipeline without delays, ``t1`` the delay of a link, and a ratio is
that of ``t1`` to ``t0 / N``. The equations are those of DSD, section 2. *Corrected* equations charge what a window
takes in one pass, and the draft.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks import slow_stage
from benchmarks.common import write
from benchmarks.netns import address, inside
from benchmarks.papers.dsd_nodes import ALPHA, WINDOW
from benchmarks.papers.dsd_pipeline import Nodes, kept
from cospec import SamplingParams
from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.assembly.sharding import load_target
from cospec.config import EngineConfig, LinkConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.distributed.model import ShardedModel
from cospec.drafters.synthetic import SyntheticDrafter
from cospec.execution.draft_ahead import DraftAhead
from cospec.models.loading import LoadOptions
from cospec.models.shard import Shard
from cospec.runtime.drafter_process_executor import Worker
from cospec.text.input_processor import make_requests

LAYERS, VOCAB = 8, 512
DRAFT_SHARE = 0.02  # of t0, for each token of a draft


@dataclass(frozen=True, slots=True)
class Times:
    """One way to decode.

    Attributes:
        token: seconds per token, all requests together.
        rounds: traversals per token, all requests together.
        depth: tokens drafted per step.
    """

    token: float
    rounds: float
    depth: float


def write_model(folder: Path, hidden: int, vocab_size: int = VOCAB) -> None:
    """Write a random Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=hidden * 11 // 4 // 32 * 32,
        num_hidden_layers=LAYERS, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def launch(seconds: float, apart: bool, name: str, shard: Shard) -> Worker:
    """Start the process of a stage that takes ``seconds`` for a window; ``apart``: in its network namespace."""
    return slow_stage.launch(slow_stage.Pace(seconds), name, shard, inside(shard.stage) if apart else ())


class Pipeline:
    """A sharded target, and engines around the target."""

    def __init__(self, folder: Path, nodes: int, given: argparse.Namespace, apart: bool) -> None:
        options = LoadOptions(device="cpu", dtype="float32", cache_bytes=256 << 20)
        hosts = tuple(address(node) for node in range(nodes)) if apart else ("127.0.0.1",)
        config = EngineConfig(pipeline_parallel_size=nodes, threads=1, stage_hosts=hosts)
        start = partial(launch, given.stage, apart)
        model, self.close = load_target(config, [(str(folder), options)], options, start)
        assert isinstance(model, ShardedModel)
        self.model, self.apart, self._given = model, apart, given
        self._drafter, self._stored = SyntheticDrafter((given.acceptance,), 0.0, VOCAB), 0

    def draft_in(self, seconds: float) -> None:
        """From now on the drafter takes so many seconds for a token of a draft."""
        self._drafter, self._stored = SyntheticDrafter((self._given.acceptance,), seconds, VOCAB), 0

    def measure(
        self, policy: str, requests: int = 1, in_flight: int | None = None, ahead: int = 0, windows: bool = True
    ) -> Times:
        """Return the median of several runs.

        Args:
            in_flight: steps in flight, by default as many as nodes.
            ahead: draft tokens of a window under ``draft-ahead``; 0: ``sequential``.
            windows: under ``draft-ahead`` a request has several windows in flight.
        """
        target = self.model if in_flight is None else _with_in_flight(self.model, in_flight)
        engine = self._engine(target, policy, ahead)
        if not windows:
            assert isinstance(engine.execution_mode, DraftAhead)
            engine.execution_mode.windows_ahead = None
        tokens = self._given.tokens
        if policy == "off":
            tokens = self._given.plain_tokens or tokens
        else:
            self.store(requests)
        runs = [self._run(engine, requests, tokens) for _ in range(self._given.repeats)]
        fields = Times.__dataclass_fields__
        return Times(**{name: median(asdict(run)[name] for run in runs) for name in fields})

    def store(self, requests: int) -> None:
        """Have the drafter store the outputs that its drafts replay; a run that is not measured."""
        if requests > self._stored:
            self._run(self._engine(self.model, "fixed"), requests, self._given.tokens)
            self._stored = requests

    def _engine(self, target: ShardedModel, policy: str, ahead: int = 0) -> Engine:
        """An engine around the target, see ``measure``."""
        length: Any = ahead or {"off": 0, "fixed": WINDOW, "goodput": "auto"}[policy]
        speculative = SpeculativeConfig(
            method="synthetic",
            num_speculative_tokens=length,
            policy=policy,
            acceptance_method="match",
            execution_mode="draft-ahead" if ahead else "sequential",
        )
        return Engine(assemble(target, self._drafter, speculative, EngineConfig(), TextInfo()))

    def _run(self, engine: Engine, count: int, tokens: int) -> Times:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for number in range(count):
            prompt = [(17 * number + place) % VOCAB for place in range(8)]
            for request in make_requests(f"{time.monotonic()}-{number}", prompt, params):
                engine.add(request)
        written: dict[str, int] = {}
        started, after = 0.0, 0
        before = engine.metrics()
        while engine.has_work:
            for event in engine.step():
                written[event.id] = written.get(event.id, 0) + len(event.tokens)
            if len(written) == count and not started:
                started, after = time.perf_counter(), sum(written.values())
                before = engine.metrics()
        seconds, found = time.perf_counter() - started, engine.metrics()
        made = sum(written.values()) - after
        rounds = found.steps - before.steps
        drafted = sum(found.draft_tokens.values()) - sum(before.draft_tokens.values())
        return Times(seconds / made, rounds / made, drafted / rounds)


def _with_in_flight(model: ShardedModel, count: int) -> ShardedModel:
    """The same processes with so many windows in flight."""
    return ShardedModel(model.name, model.pipeline, model.pages, (model.vocab_size, model.max_len), count)


def measure_ahead(pipeline: Pipeline, length: int) -> dict[str, Any]:
    """Measure windows of ``length`` draft tokens under ``draft-ahead``: one, several, and several to their end."""
    one, several = (pipeline.measure("fixed", ahead=length, windows=windows) for windows in (False, True))
    with uncancelled(pipeline.model):
        late = pipeline.measure("fixed", ahead=length)
    return {"one": asdict(one), "several": asdict(several), "no early exit": asdict(late)}


@contextmanager
def uncancelled(model: ShardedModel) -> Iterator[None]:
    """Stages compute refuted windows too."""

    def ignored(number: int) -> None:
        pass

    model.pipeline.cancel = ignored  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.pipeline.cancel


def measure_nodes(folder: Path, count: int, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a pipeline of ``count`` nodes without delays, then over links."""
    with closing(Pipeline(folder, count, given, apart=False)) as pipeline:
        plain, window = pipeline.measure("off"), pipeline.measure("fixed")
        t0 = plain.token
        links = count if given.namespaces else count - 1
        nodes = Nodes(count, t0, window.token / window.rounds, DRAFT_SHARE * t0, links)
        if not given.namespaces:
            delays = [ratio * t0 / count for ratio in given.ratios]
            return {
                "nodes": asdict(nodes),
                "rows": [measure_links(pipeline, nodes, t1, delays, given) for t1 in delays],
            }
    with closing(Pipeline(folder, count, given, apart=True)) as pipeline:
        return {"nodes": asdict(nodes), "rows": [measure_links(pipeline, nodes, given.delay, [given.delay], given)]}


def measure_links(
    pipeline: Pipeline, nodes: Nodes, t1: float, delays: Sequence[float], given: argparse.Namespace
) -> dict[str, Any]:
    """Measure links of ``t1`` seconds; after the last of ``delays`` as many requests as nodes run together.

    Outputs are stored before the links are slow, which takes less time.
    """
    pipeline.draft_in(nodes.draft)
    if not pipeline.apart:
        pipeline.model.pipeline.set_links([LinkConfig()])
        pipeline.store(1 if given.alone else nodes.count)
        pipeline.model.pipeline.set_links([LinkConfig(delay=t1)])
    alone = {policy: pipeline.measure(policy) for policy in ("off", "fixed", "goodput")}
    row = {
        "ratio": round(t1 * nodes.count / nodes.t0, 3),
        "t1": t1,
        "measured": {name: asdict(times) for name, times in alone.items()},
        "predicted": nodes.equations(t1, kept(asdict(alone["fixed"]))),
    }
    if given.ahead:
        row["ahead"] = {str(length): measure_ahead(pipeline, length) for length in given.ahead}
    if t1 == delays[-1] and not given.alone:
        row["together"] = {
            "one token, windows in flight": asdict(pipeline.measure("off", nodes.count)),
            "windows, one in flight": asdict(pipeline.measure("fixed", nodes.count, 1)),
            "windows in flight": asdict(pipeline.measure("fixed", nodes.count)),
        }
    return row


def tables(found: Sequence[dict[str, Any]]) -> list[Table]:
    """Show measured and predicted figures."""
    times = Table(
        "N", "t1 / (t0/N)", "plain ms", "eq. 3", "error", "window ms", "eq. 4", "corrected", "error", box=None
    )
    speeds = Table("N", "t1 / (t0/N)", "speed", "eq. 9", "corrected", "goodput", "its length", "rounds/token", box=None)
    ahead = Table(
        "Drafts ahead, one request", "N", "t1 / (t0/N)", "one window ms/token", "several", "speed", "no early exit",
        box=None,
    )  # fmt: skip
    together = Table("N requests over N nodes", "N", "ms/token", "speed over one token in flight", box=None)
    for each in found:
        count = each["nodes"]["count"]
        for row in each["rows"]:
            got, said = row["measured"], row["predicted"]
            plain, window, free = (got[name]["token"] for name in ("off", "fixed", "goodput"))
            times.add_row(
                str(count), f"{row['ratio']:g}", f"{plain * 1e3:.2f}", f"{said['plain_eq3'] * 1e3:.2f}",
                f"{plain / said['plain_eq3'] - 1:+.0%}", f"{window * 1e3:.2f}", f"{said['window_eq4'] * 1e3:.2f}",
                f"{said['window_corrected'] * 1e3:.2f}", f"{window / said['window_corrected'] - 1:+.0%}",
            )  # fmt: skip
            speeds.add_row(
                str(count), f"{row['ratio']:g}", f"{plain / window:.2f}", f"{said['speed_eq9']:.2f}",
                f"{said['speed_corrected']:.2f}", f"{plain / free:.2f}", f"{got['goodput']['depth']:.1f}",
                f"{got['fixed']['rounds']:.2f}",
            )  # fmt: skip
            for length, own in row.get("ahead", {}).items():
                one, several, late = (own[name]["token"] for name in ("one", "several", "no early exit"))
                ahead.add_row(
                    f"{length} draft tokens", str(count), f"{row['ratio']:g}", f"{one * 1e3:.2f}",
                    f"{several * 1e3:.2f}", f"{one / several:.2f}", f"{one / late:.2f}",
                )  # fmt: skip
            for name, own in row.get("together", {}).items():
                base = row["together"]["one token, windows in flight"]["token"]
                together.add_row(name, str(count), f"{own['token'] * 1e3:.2f}", f"{base / own['token']:.2f}")
    return [times, speeds, ahead, together]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 1.0, 3.0, 10.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--plain-tokens", type=int, help="of runs without drafts, whose tokens take equally long")
    parser.add_argument("--alone", action="store_true", help="no runs of as many requests as nodes")
    parser.add_argument(
        "--ahead", type=int, nargs="*", default=[], help="draft tokens of windows; one request has several in flight"
    )
    parser.add_argument("--acceptance", type=float, default=ALPHA, help="probability that a draft token is right")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--stage", type=float, default=0.02, help="seconds of a node for a window")
    parser.add_argument("--namespaces", type=int, default=0, help="nodes in namespaces of benchmarks.netns")
    parser.add_argument("--delay", type=float, default=0.01, help="mean seconds of a link between namespaces")
    parser.add_argument("--name", help="of the results")
    given = parser.parse_args(arguments)
    if given.namespaces:
        given.nodes = [given.namespaces]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.hidden)
        found = [measure_nodes(Path(folder), count, given) for count in given.nodes]
    for table in tables(found):
        Console().print(table)
    write(
        given.name or ("dsd_namespaces" if given.namespaces else "dsd"),
        {
            "options": vars(given),
            "acceptance": given.acceptance,
            "window": WINDOW,
            "stage": given.stage,
            "pipelines": found,
        },
    )


if __name__ == "__main__":
    main()
