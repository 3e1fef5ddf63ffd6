"""Costs that do not depend on the clock, compared with the costs in ``guard.json``.

Run ``python benchmarks/guard.py``. Exit status 1 means that a cost rose. ``--update`` stores the measured costs, after
a change that justifies its cost. Fixed requests run on toy models. The guard counts forwards and rows (tokens in the
forwards) of target and drafters, per step and per generated token. A tiny Llama counts the tensor operations of a
commit, which moves cache entries. Counts are equal with and without the native library.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine, EngineComponents
from cospec.core.interfaces import ExecutionMode, Model
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import StepResult, SubmittedStep
from cospec.core.types import Commit, SchedulerOutput
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.models.hf_logging import hf_logging_off
from cospec.models.loading import LoadOptions, load_model
from cospec.models.toy import ToyModel
from cospec.registry import COMBINERS, ROUTINGS
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.enumeration import ChosenDrafter

STORED = Path(__file__).with_name("guard.json")
REQUESTS, TOKENS, LENGTH, VOCAB = 6, 40, 3, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=TOKENS)
Costs = dict[str, dict[str, float]]


@dataclass(slots=True)
class Drafting:
    """A drafter and the models that the drafter runs."""

    drafter: Drafter | None = None
    models: Sequence[ToyModel] = ()


class CountingExecutionMode:
    """Wraps an execution mode, and counts its commits and their tensor operations."""

    def __init__(self, execution_mode: ExecutionMode) -> None:
        self.execution_mode, self.components = execution_mode, execution_mode.components
        self.info, self.learns = execution_mode.info, execution_mode.learns
        self.windows_ahead = execution_mode.windows_ahead
        self.commits, self.ops = 0, TensorOps()

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        return self.execution_mode.submit(plan)

    def collect(self, step: SubmittedStep) -> StepResult:
        result = self.execution_mode.collect(step)
        self.info = self.execution_mode.info
        return result

    def commit(self, commits: Sequence[Commit]) -> None:
        self.commits += len(commits)
        with self.ops:
            self.execution_mode.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        self.execution_mode.free(ids)

    def close(self) -> None:
        self.execution_mode.close()


class TensorOps(TorchDispatchMode):
    """Counts every tensor operation in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def parts_of(target: Model, drafter: Drafter | None, length: int = LENGTH) -> EngineComponents:
    """Build the components of an engine without text."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=length, policy="fixed")
    return assemble(target, drafter, speculative, EngineConfig(), TextInfo())


def drive(engine: Engine, params: SamplingParams, vocab: int) -> None:
    """Run fixed requests to their end."""
    for number in range(REQUESTS):
        prompt = [(number + place) % vocab for place in range(4)]
        (request,) = make_requests(f"guard-{number}", prompt, params)
        engine.add(replace(request, seed=number))
    while engine.has_work:
        engine.step()


def on_toys(drafting: Drafting, params: SamplingParams) -> dict[str, float]:
    """Return forwards and rows of the target and of the drafters."""
    target = ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)
    engine = Engine(parts_of(target, drafting.drafter))
    drive(engine, params, VOCAB)
    metrics = engine.metrics()
    found = {}
    for who, models in (("target", [target]), ("drafter", drafting.models)):
        forwards, rows = sum(model.calls for model in models), sum(model.rows for model in models)
        if models:
            found[f"{who}_forwards_per_round"] = forwards / metrics.steps
            found[f"{who}_forwards_per_token"] = forwards / metrics.generation_tokens
            found[f"{who}_rows_per_token"] = rows / metrics.generation_tokens
    return found


def model_drafting() -> Drafting:
    """Draft with one model."""
    model = ToyModel(VOCAB, order=1, seed=1, sharpness=2.0)
    return Drafting(ModelDrafter(model), [model])


def pool_drafting(combiner: str) -> Drafting:
    """Draft with two models and prompt lookup, routed by ``hedge``."""
    models = [ToyModel(VOCAB, order=1, seed=seed, sharpness=2.0) for seed in (1, 2)]
    drafters: dict[str, Drafter] = {
        "first": ModelDrafter(models[0]),
        "second": ModelDrafter(models[1]),
        "copy": NgramDrafter(1, 3),
    }
    made = COMBINERS.load(combiner)()
    members = [Member.of(name, each, time.monotonic, made.is_stepwise) for name, each in drafters.items()]
    return Drafting(PoolDrafter(members, made, ROUTINGS.load("hedge")(), PoolContext(VOCAB)), models)


def on_a_llama(folder: Path, drafter: Drafter) -> dict[str, float]:
    """Return the tensor operations of a commit: none for a chain, the moved nodes for a branching tree."""
    options = LoadOptions(
        device="cpu", dtype="float32", linear_backend="torch", attention_backend="sdpa", fused="never",
        cache_bytes=1 << 20, max_num_seqs=REQUESTS,
    )  # fmt: skip
    parts = parts_of(load_model(str(folder), options), drafter, 8)
    counted = CountingExecutionMode(parts.execution_mode)
    with torch.inference_mode():
        drive(Engine(replace(parts, execution_mode=cast(ExecutionMode, counted))), replace(GREEDY, max_tokens=12), 4)
    return {"tensor_operations_per_commit": counted.ops.count / counted.commits}


def write_llama(folder: Path) -> None:
    """Save a random Llama with a vocabulary of four, so that a tree of all tokens always has a correct token."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    with hf_logging_off():
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def measure() -> Costs:
    """Measure every cost of every scenario."""
    found = {
        "plain": on_toys(Drafting(), GREEDY),
        "draft_model, greedy": on_toys(model_drafting(), GREEDY),
        "draft_model, sampled": on_toys(model_drafting(), SAMPLED),
        "ngram, greedy": on_toys(Drafting(NgramDrafter(1, 3)), GREEDY),
    }
    for combiner in COMBINERS:
        found[f"pool, {combiner}"] = on_toys(pool_drafting(combiner), GREEDY)
    with tempfile.TemporaryDirectory() as name:
        write_llama(Path(name))
        found["chain, cache"] = on_a_llama(Path(name), ChosenDrafter((0, 1, 2), (-1, 0, 1)))
        tree = ChosenDrafter((0, 1, 2, 3, 0, 1, 2, 3), (-1, -1, -1, -1, 3, 3, 3, 3))
        found["tree, cache"] = on_a_llama(Path(name), tree)
    return {name: {key: round(value, 4) for key, value in costs.items()} for name, costs in found.items()}


def regressions(found: Mapping[str, Mapping[str, float]], stored: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Describe costs above the stored costs, and costs without a stored value."""
    complaints = []
    for name, costs in found.items():
        for key, value in costs.items():
            before = stored.get(name, {}).get(key)
            if before is None:
                complaints.append(f"{name}: {key} is {value:g}, and nothing is stored for it")
            elif value > before + 1e-6:
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
