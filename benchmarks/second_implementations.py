"""What each native second implementation gains over its readable twin.

Run ``python -m benchmarks.second_implementations [PAIR ...]``. Both engines of a pair are in this process and write as
many tokens for the same prompts, in turns. Figures are the median of the paired ratios of seconds, readable over
native, and the 95% bootstrap interval. A second implementation stays where the ratio is at least ``GAIN`` at a batch,
or for the reason in ``REASONS``. The rows of pairs that did not run stay in the results.

- lockstep: ``native/pool_lockstep.py`` against ``drafters/pool/lockstep.py``, in pools of four drafters of the zoo.
- steps: ``--native auto`` against ``--native off``, which also runs acceptance methods and rollouts in Python.
- acceptance: ``native/acceptance.py`` against ``acceptance/``, both with ``--native off`` elsewhere.
- forward: ``native/llama_forward.py`` against ``models/llama.py``, for target and drafter, with the same step.
- batch: ``csrc/model/input_batch.cpp`` against ``models/input_batch.py``, with ``--native off`` and the native forward.
- products, attention: ``native/operators.py`` against torch, in transformers' forward.
- rollouts: ``Model.rollout`` against ``drafters/model.py`` token by token, with ``--native off`` elsewhere.
- pool rollouts: the same for the members of a voting pool.
- proposals: the same in an ensemble whose members propose.
- ngram, suffix: ``csrc/spec/*_lookup.cpp`` against ``drafters/ngram.py`` and ``drafters/suffix.py``.
- blend: ``csrc/spec/blend.cpp`` against ``ensemble/blends/``, in the same ensemble.
- candidates: ``csrc/spec/candidates.cpp`` against ``drafters/pool/candidates.py`` and ``known_token_scores.py``.
- sampling: ``csrc/ops/sampling.cpp`` against ``core/sampling.py`` and ``rng/random_streams.py``, for sampled trees.
- tensors: ``acceptance/tensor/``, which the engine takes on a GPU alone, against ``acceptance/``, here on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

from benchmarks.common import DOMAINS, ROOT, alternate, machine, prompts, write
from cospec import LLM, SamplingParams
from cospec.acceptance import python_verification
from cospec.acceptance.tensor import verify as tensor
from cospec.core.verifier import TargetVerifier
from cospec.drafters import known_token_scores
from cospec.drafters.lookup import LookupDrafter
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool import candidates
from cospec.drafters.pool.pool import PoolDrafter
from cospec.ensemble.blends import weighted
from cospec.ensemble.ensemble import ProposingEnsemble
from cospec.models import loading
from cospec.models.attention.sdpa import SDPA
from cospec.models.llama import FusedLlama
from cospec.models.model_runner import ModelRunner
from cospec.models.weight_loading import load_llama_weights
from cospec.native import library
from cospec.process_utils import freeze_gc

CHAIN = {"method": "draft_model", "num_speculative_tokens": 4}
TREE = {**CHAIN, "num_speculative_tokens": 3, "widths": [3, 2, 1]}
MEMBERS = {"generic": "zoo:drafter", "code": "zoo:code", "math": "zoo:math", "prose": "zoo:prose"}
ENSEMBLE: dict[str, Any] = {
    "models": ["zoo", "zoo:drafter"], "ensemble": {"method": "weighted", "lambda": 0.4}, "collaboration": {"gamma": 3},
}  # fmt: skip
BATCHES = (1, 8)
GAIN = 1.05  # at a batch, for which a second implementation stays
REASONS = {  # why a second implementation stays without such a gain
    "rollouts": "one implementation with pool rollouts and proposals, which gain",
    "tensors": "for a GPU alone; no gain measured",
}
ROOM = 1 << 28  # bytes of KV caches of each engine
RESULTS = ROOT / "benchmarks" / "results" / "second_implementations.json"
Patched = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A native and a readable engine.

    Attributes:
        temperature: of the requests; pairs about random draws sample.
        native_patch, readable_patch: entered around each run of the engine.
    """

    native: LLM
    readable: LLM
    temperature: float = 0.0
    native_patch: Patched = nullcontext
    readable_patch: Patched = nullcontext


def pool(combiner: str) -> dict[str, Any]:
    """Return the options of a pool of the zoo's drafters."""
    listed = [{"name": name, "method": "draft_model", "model": model} for name, model in MEMBERS.items()]
    return {"method": "pool", "combiner": combiner, "drafters": listed, "num_speculative_tokens": 4}


def engine(speculative: dict[str, Any], batch: int, **options: Any) -> LLM:
    """Return an engine on the zoo's target."""
    return LLM("zoo", speculative, max_num_seqs=batch, kv_cache_memory_bytes=ROOM, **options)


def ensemble(batch: int) -> LLM:
    """Return an ensemble whose members propose."""
    return LLM(**ENSEMBLE, max_num_seqs=batch, kv_cache_memory_bytes=ROOM)


def lockstep(llm: LLM, native: bool) -> LLM:
    """Let the engine's pool draft in lockstep natively, or in Python."""
    drafter = llm.engine.execution_mode.components.drafter
    assert isinstance(drafter, PoolDrafter)
    drafter.setting = replace(drafter.setting, native=native)
    return llm


@contextmanager
def given(owner: type, **options: Any) -> Iterator[None]:
    """Let objects of a class be made with other options."""
    create = owner.__init__  # type: ignore[misc]

    def make(*args: Any, **named: Any) -> None:
        bound = signature(create).bind(*args, **named)
        bound.arguments.update(options)
        create(*bound.args, **bound.kwargs)

    with patch.object(owner, "__init__", make):
        yield


def stepwise(speculative: dict[str, Any], batch: int, native_acceptance: bool = True) -> LLM:
    """Return an engine with steps in Python, and with native or readable acceptance."""
    with given(TargetVerifier, native=native_acceptance):
        return engine(speculative, batch, native="off")


def torch_forward(batch: int) -> LLM:
    """Return an engine whose models run ``models/llama.py`` in torch."""

    def read(config: Any, recipe: Any) -> Any:
        weights = load_llama_weights(recipe)
        shape = {"kv_heads": weights.kv_heads, "dim": weights.dim, "num_layers": len(weights.layers)}
        return SimpleNamespace(facts={"config": shape}, weights=weights)

    in_torch = patch.object(FusedLlama, "packed", lambda made: FusedLlama.build(made.weights, SDPA, False))
    with patch.object(loading, "_packed", read), in_torch:
        return engine(CHAIN, batch)


def transformers_forward(batch: int, **options: Any) -> LLM:
    """Return an engine whose models run transformers' code, as other architectures than Llama's do."""
    with patch.object(loading, "why_not", return_value="a benchmark"):
        return engine(CHAIN, batch, **options)


def rollouts(build_engine: Callable[[], LLM], native: bool) -> LLM:
    """Return an engine whose model drafters have ``Model.rollout``, or draft token by token."""
    with given(ModelDrafter, native=native):
        return build_engine()


def without_rollouts(batch: int) -> LLM:
    """Return the ensemble with proposals token by token."""
    with given(ProposingEnsemble, rollouts=False):
        return ensemble(batch)


def together(*patches: Patched) -> AbstractContextManager[Any]:
    """Enter several patches."""
    stack = ExitStack()
    for each in patches:
        stack.enter_context(each())
    return stack


def never(owner: object, name: str) -> Patched:
    """Return a patch by which a function or method of ``owner`` answers False."""
    return lambda: patch.object(owner, name, lambda *_: False)


READS = partial(together, never(candidates, "reads_natively"), never(known_token_scores, "reads_natively"))
BLENDS = partial(together, never(weighted, "native_reads"), never(TargetVerifier, "supports_blend"))
PACKED = partial(patch.object, ModelRunner, "native_forward", new_callable=PropertyMock, return_value=None)
TENSORS = partial(patch.object, python_verification, "verify_drafts", tensor.verify_drafts)


def pool_pair(combiner: str, temperature: float, batch: int) -> Pair:
    """Return a pool with native and readable lockstep."""
    native, readable = (lockstep(engine(pool(combiner), batch), kind) for kind in (True, False))
    return Pair(native, readable, temperature)


def rollout_pair(build_engine: Callable[[], LLM]) -> Pair:
    """Return two engines whose drafters have rollouts, and have none."""
    return Pair(rollouts(build_engine, True), rollouts(build_engine, False))


def lookup_pair(method: str, batch: int) -> Pair:
    """Return two engines that look up drafts in the library, and in Python before each step."""
    speculative = {"method": method, "num_speculative_tokens": 4}
    with given(LookupDrafter, native=False):
        readable = engine(speculative, batch)
    return Pair(engine(speculative, batch), readable)


def candidates_pair(batch: int) -> Pair:
    """Return two pools in Python's lockstep, with native and readable candidates."""
    native, readable = (lockstep(engine(pool("fuse"), batch), False) for _ in range(2))
    return Pair(native, readable, readable_patch=READS)


PAIRS: dict[str, Callable[[int], Pair]] = {
    "lockstep fuse": partial(pool_pair, "fuse", 0.0),
    "lockstep mix": partial(pool_pair, "mix", 0.8),
    "steps": lambda batch: Pair(engine(CHAIN, batch), engine(CHAIN, batch, native="off")),
    "acceptance": lambda batch: Pair(stepwise(CHAIN, batch), stepwise(CHAIN, batch, False), 0.8),
    "forward": lambda batch: Pair(engine(CHAIN, batch), torch_forward(batch)),
    "batch": lambda batch: Pair(stepwise(CHAIN, batch), stepwise(CHAIN, batch), readable_patch=PACKED),
    "products": lambda batch: Pair(transformers_forward(batch), transformers_forward(batch, linear_backend="mkldnn")),
    "attention": lambda batch: Pair(transformers_forward(batch), transformers_forward(batch, attention_backend="sdpa")),
    "rollouts": lambda batch: rollout_pair(lambda: stepwise(CHAIN, batch)),
    "pool rollouts": lambda batch: rollout_pair(lambda: engine(pool("vote"), batch)),
    "proposals": lambda batch: Pair(ensemble(batch), without_rollouts(batch), 0.8),
    "ngram": partial(lookup_pair, "ngram"),
    "suffix": partial(lookup_pair, "suffix"),
    "blend": lambda batch: Pair(ensemble(batch), ensemble(batch), 0.8, readable_patch=BLENDS),
    "candidates": candidates_pair,
    "sampling": lambda batch: Pair(
        stepwise(TREE, batch), stepwise(TREE, batch), 0.8, readable_patch=never(library, "available")
    ),
    "tensors": lambda batch: Pair(stepwise(CHAIN, batch, False), stepwise(CHAIN, batch, False), 0.8, TENSORS),
}


def why_it_stays(name: str, ratios: Mapping[int, float]) -> str:
    """Why the native part of a pair stays, by its ratios at each batch.

    Raises:
        LookupError: there is neither a gain nor a declared reason.
    """
    gains = {batch: ratio for batch, ratio in ratios.items() if round(ratio, 2) >= GAIN}
    if not gains:
        return REASONS[name]
    batch = max(gains, key=lambda each: gains[each])
    return f"gains {gains[batch]:.2f} at batch {batch}"


def runner(llm: LLM, params: SamplingParams, patched: Patched) -> Callable[[Sequence[str]], list[Any]]:
    """Return what generates the token ids of some prompts."""

    def run(texts: Sequence[str]) -> list[Any]:
        with patched():
            return [output.outputs[0].token_ids for output in llm.generate(list(texts), params, use_tqdm=False)]

    return run


def measured(name: str, batch: int, turns: int, tokens: int) -> dict[str, Any]:
    """Return the row of one pair."""
    pair = PAIRS[name](batch)
    freeze_gc()
    params = SamplingParams(temperature=pair.temperature, seed=1, max_tokens=tokens, ignore_eos=True)
    texts = [text for domain in DOMAINS for text in prompts(domain, -(-batch // len(DOMAINS)))][:batch]
    native = runner(pair.native, params, pair.native_patch)
    readable = runner(pair.readable, params, pair.readable_patch)
    samples = alternate({"native": native, "readable": readable}, [texts], turns)
    ratio, low, high = samples.ratio("readable", "native")
    for llm in (pair.native, pair.readable):
        llm.close()
    own = {"temperature": pair.temperature, "turns": turns, "tokens": tokens, "date": machine()["date"]}
    return {"name": name, "batch": batch, "ratio": ratio, "low": low, "high": high, **own}


def main() -> None:
    """Measure pairs and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", choices=[[], *PAIRS], help=", ".join(PAIRS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    stored = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else []
    rows = {(row["name"], row["batch"]): row for row in stored if row["name"] in PAIRS}
    for name in given.pairs or PAIRS:
        for batch in BATCHES:
            row = rows[name, batch] = measured(name, batch, given.turns, given.tokens)
            print("{name:16} batch {batch}: {ratio:.3f} [{low:.3f}, {high:.3f}]".format(**row), flush=True)
    write(
        "second_implementations",
        {"rows": [rows[name, batch] for name in PAIRS for batch in BATCHES if (name, batch) in rows]},
    )


if __name__ == "__main__":
    main()
