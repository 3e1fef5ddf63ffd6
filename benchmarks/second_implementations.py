"""What each native second implementation gains over its readable twin.

Run ``python -m benchmarks.second_implementations``. Both engines of a pair are in this process and generate the same
outputs for the same prompts, in turns. Figures are the median of the paired ratios of seconds, readable over native,
and the 95% bootstrap interval. A second implementation stays only where the ratio is at least 1.05.

- lockstep: ``native/pool_lockstep.py`` against ``drafters/pool/lockstep.py``, in pools of four drafters of the zoo.
- steps: ``--native auto`` against ``--native off``, which also runs acceptance methods and rollouts in Python.
- acceptance: ``native/verifier.py`` against ``acceptance/``, both with ``--native off`` elsewhere.
- forward: ``native/llama_forward.py`` against ``models/llama.py``, for target and drafter, with the same step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.common import DOMAINS, alternate, prompts, write
from cospec import LLM, SamplingParams
from cospec.core.verifier import TargetVerifier
from cospec.drafters.pool.pool import PoolDrafter
from cospec.models.llama import FusedLlama
from cospec.process_utils import freeze_gc

MEMBERS = {"generic": "zoo:drafter", "code": "zoo:code", "math": "zoo:math", "prose": "zoo:prose"}
SAMPLED = ("lockstep mix", "acceptance")  # pairs that differ most where tokens are sampled
ROOM = 1 << 28  # bytes of KV caches of each engine
Run = Callable[[Sequence[str]], object]


def pool(combiner: str) -> dict[str, Any]:
    """Return the options of a pool of the zoo's drafters."""
    listed = [{"name": name, "method": "draft_model", "model": model} for name, model in MEMBERS.items()]
    return {"method": "pool", "combiner": combiner, "drafters": listed, "num_speculative_tokens": 4}


def engine(speculative: dict[str, Any], batch: int, **options: Any) -> LLM:
    """Return an engine on the zoo's target."""
    return LLM("zoo", speculative, max_num_seqs=batch, kv_cache_memory_bytes=ROOM, **options)


def lockstep(llm: LLM, native: bool) -> LLM:
    """Let the engine's pool draft in lockstep natively, or in Python."""
    drafter = llm.engine.execution_mode.components.drafter
    assert isinstance(drafter, PoolDrafter)
    drafter.setting = replace(drafter.setting, native=native)
    return llm


def acceptance(llm: LLM, native: bool) -> LLM:
    """Let an engine with ``--native off`` verify drafts natively, or in Python."""
    mode = llm.engine.execution_mode
    verifier = mode.components.verifier
    assert isinstance(verifier, TargetVerifier)
    own = TargetVerifier(verifier.model, verifier.blend, verifier.acceptance_methods, native)
    mode.components = replace(mode.components, verifier=own)
    return llm


def torch_forward(speculative: dict[str, Any], batch: int) -> LLM:
    """Return an engine whose models run ``models/llama.py`` in torch."""
    build = FusedLlama.build
    with patch.object(FusedLlama, "build", lambda weights, attention, in_place: build(weights, attention, False)):
        return engine(speculative, batch)


def runner(llm: LLM, params: SamplingParams) -> Run:
    """Return what generates the outputs of some prompts."""
    return lambda texts: llm.generate(list(texts), params, use_tqdm=False)


def pairs(batch: int) -> dict[str, tuple[LLM, LLM]]:
    """Return a native and a readable engine for each second implementation."""
    chain = {"method": "draft_model", "num_speculative_tokens": 4}
    found = {
        f"lockstep {name}": (lockstep(engine(pool(name), batch), True), lockstep(engine(pool(name), batch), False))
        for name in ("fuse", "mix")
    }
    readable = [acceptance(engine(chain, batch, native="off"), native) for native in (True, False)]
    return found | {
        "steps": (engine(chain, batch), engine(chain, batch, native="off")),
        "acceptance": (readable[0], readable[1]),
        "forward": (engine(chain, batch), torch_forward(chain, batch)),
    }


def measured(name: str, twins: tuple[LLM, LLM], batch: int, turns: int, tokens: int) -> dict[str, Any]:
    """Return the row of one second implementation."""
    temperature = 0.8 if name in SAMPLED else 0.0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True)
    texts = [text for domain in DOMAINS for text in prompts(domain, -(-batch // len(DOMAINS)))][:batch]
    native, readable = twins
    samples = alternate({"native": runner(native, params), "readable": runner(readable, params)}, [texts], turns)
    ratio, low, high = samples.ratio("readable", "native")
    return {"name": name, "batch": batch, "temperature": temperature, "ratio": ratio, "low": low, "high": high}


def main() -> None:
    """Measure all pairs and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    rows = []
    for batch in (1, 8):
        for name, twins in pairs(batch).items():
            freeze_gc()
            rows.append(measured(name, twins, batch, given.turns, given.tokens))
            print("{name:16} batch {batch}: {ratio:.3f} [{low:.3f}, {high:.3f}]".format(**rows[-1]), flush=True)
    write("second_implementations", {"turns": given.turns, "tokens": given.tokens, "rows": rows})


if __name__ == "__main__":
    main()
