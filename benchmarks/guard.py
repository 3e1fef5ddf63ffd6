"""Costs that do not depend on the clock, held against those stored in ``guard.json``.

Run ``python benchmarks/guard.py``; exit status 1 when something costs more than it did. ``--update`` stores what is
found, which is right after a change that is worth its cost. Fixed requests run on toy models, and on a tiny Llama for
what its cache moves. Counted are rounds of the target per token, forwards of target and drafter per round, tensor
operations per commit, and calls of this package's own Python functions per round, a pool's own among them by
themselves. Functions of the native library and those that stand in for it are left out, so that it does not matter
whether it was built.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cospec.bench.verify.enumeration import ChosenDrafter
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.member import Member
from cospec.drafters.pool.pool import PoolDrafter, PoolSetting
from cospec.engine.build import Text, connect
from cospec.engine.engine import Engine
from cospec.engine.requests import make_requests
from cospec.models.loading import LoadOptions, load_model
from cospec.models.quiet import quiet
from cospec.models.toy import ToyModel
from cospec.params import SamplingParams
from cospec.protocols import Drafter, Model
from cospec.registry import COMBINERS, ROUTINGS

STORED = Path(__file__).with_name("guard.json")
POOLING = (
    "cospec.drafters.combiners",
    "cospec.drafters.pool",
    "cospec.drafters.routing",
    "cospec.drafters.calibration",
)
LEFT_OUT = ("cospec.native", "cospec.draws", "cospec.models.toy")
SLACK = {
    "python_calls_per_round": 1.1,
    "pooling_calls_per_round": 1.1,
}  # by how much a cost may grow; 1 where it is not named
REQUESTS, TOKENS, LENGTH, VOCAB = 6, 40, 3, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=TOKENS)
Costs = dict[str, dict[str, float]]


@dataclass(slots=True)
class Counter:
    """How often something happened, and how much of that was a pool's own work: combining, weighting, routing."""

    count: int = 0
    pooling: int = 0


@contextmanager
def python_calls(counter: Counter) -> Iterator[None]:
    """Count calls of the package's functions; expressions that newer Pythons inline are none."""

    def seen(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("cospec.") and not name.startswith(LEFT_OUT):
            named = not frame.f_code.co_name.startswith("<")
            counter.count += named
            counter.pooling += named and name.startswith(POOLING)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)


class TensorOps(TorchDispatchMode):
    """Counts every tensor operation that runs inside it."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.count += 1
        return func(*args, **(kwargs or {}))


def engine_of(target: Model, drafter: Drafter | None, length: int = LENGTH) -> Engine:
    """An engine without text."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=length, policy="fixed")
    return Engine(connect(target, drafter, speculative, EngineConfig(), Text()))


def drive(engine: Engine, params: SamplingParams, vocab: int) -> None:
    """Fixed requests to their end."""
    for number in range(REQUESTS):
        prompt = [(number + place) % vocab for place in range(4)]
        (request,) = make_requests(f"guard-{number}", prompt, params)
        engine.add(replace(request, seed=number))
    while engine.has_work:
        engine.step()


def on_toys(drafter: Callable[[], Drafter | None], params: SamplingParams) -> dict[str, float]:
    """Rounds, forwards and Python calls."""
    target, calls = ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), Counter()
    made = drafter()
    drive(engine_of(target, made), params, VOCAB)  # whatever is set up once
    engine = engine_of(target, made)
    begun = _forwards(target, made)
    with python_calls(calls):
        drive(engine, params, VOCAB)
    metrics = engine.metrics()
    found = {
        "target_calls_per_token": metrics.target_calls / metrics.generation_tokens,
        "forwards_per_round": (_forwards(target, made) - begun) / metrics.rounds,
        "python_calls_per_round": calls.count / metrics.rounds,
    }
    return found | ({"pooling_calls_per_round": calls.pooling / metrics.rounds} if calls.pooling else {})


def _forwards(target: ToyModel, drafter: Drafter | None) -> int:
    drafters = [each.drafter for each in drafter.members] if isinstance(drafter, PoolDrafter) else [drafter]
    models = [own for each in drafters if (own := getattr(each, "model", None)) is not None]
    return target.calls + sum(model.calls for model in models)


def pool_of(combiner: str) -> PoolDrafter:
    """Two models and prompt lookup, routed by ``hedge``."""
    drafters: dict[str, Drafter] = {
        "first": ModelDrafter(ToyModel(VOCAB, order=1, seed=1, sharpness=2.0)),
        "second": ModelDrafter(ToyModel(VOCAB, order=1, seed=2, sharpness=2.0)),
        "copy": NgramDrafter(1, 3),
    }
    made = COMBINERS.load(combiner)()
    members = [Member.of(name, each, time.monotonic, made.steps) for name, each in drafters.items()]
    return PoolDrafter(members, made, ROUTINGS.load("hedge")(), PoolSetting(VOCAB))


def on_a_llama(folder: Path, drafter: Drafter) -> dict[str, float]:
    """Tensor operations that a commit costs: none for a chain, the moved nodes of a branching tree."""
    options = LoadOptions(
        device="cpu", dtype="float32", linear_backend="torch", attention_backend="sdpa", fused="never",
        cache_bytes=1 << 20, max_num_seqs=REQUESTS,
    )  # fmt: skip
    engine, ops, rounds = engine_of(load_model(str(folder), options), drafter, 8), Counter(), Counter()
    commit = engine.round.commit

    def counted(commits: Any) -> None:
        rounds.count += len(commits)
        with TensorOps(ops):
            commit(commits)

    engine.round.commit = counted  # type: ignore[method-assign]
    with torch.inference_mode():
        drive(engine, replace(GREEDY, max_tokens=12), 4)
    return {"tensor_operations_per_commit": ops.count / rounds.count}


def write_llama(folder: Path) -> None:
    """A random Llama of four words, so that a tree of all of them always has one that is right."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def measure() -> Costs:
    """Every cost of every scenario."""

    def model() -> Drafter:
        return ModelDrafter(ToyModel(VOCAB, order=1, seed=1, sharpness=2.0))

    found = {
        "plain": on_toys(lambda: None, GREEDY),
        "draft_model, greedy": on_toys(model, GREEDY),
        "draft_model, sampled": on_toys(model, SAMPLED),
        "ngram, greedy": on_toys(lambda: NgramDrafter(1, 3), GREEDY),
    }
    for combiner in COMBINERS:
        made = partial(pool_of, combiner)
        on_toys(made, GREEDY)  # what a process keeps for good is made by then, and no part of a round
        found[f"pool, {combiner}"] = on_toys(made, GREEDY)
    with tempfile.TemporaryDirectory() as name:
        write_llama(Path(name))
        found["chain, cache"] = on_a_llama(Path(name), ChosenDrafter((0, 1, 2), (-1, 0, 1)))
        tree = ChosenDrafter((0, 1, 2, 3, 0, 1, 2, 3), (-1, -1, -1, -1, 3, 3, 3, 3))
        found["tree, cache"] = on_a_llama(Path(name), tree)
    return {name: {key: round(value, 4) for key, value in costs.items()} for name, costs in found.items()}


def regressions(found: Mapping[str, Mapping[str, float]], stored: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What costs more than is stored, or is not stored at all, in words."""
    complaints = []
    for name, costs in found.items():
        for key, value in costs.items():
            before = stored.get(name, {}).get(key)
            if before is None:
                complaints.append(f"{name}: {key} is {value:g}, and nothing is stored for it")
            elif value > before * SLACK.get(key, 1.0) + 1e-6:
                complaints.append(f"{name}: {key} rose from {before:g} to {value:g}")
    return complaints


def main() -> None:
    """Measure, then compare or store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="store what is found")
    options = parser.parse_args()
    found = measure()
    if options.update:
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, costs in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in costs.items()))
    complaints = regressions(found, json.loads(STORED.read_text(encoding="utf-8")))
    for complaint in complaints:
        print("REGRESSION", complaint, file=sys.stderr)
    if complaints:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
