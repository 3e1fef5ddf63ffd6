"""Settings and systems of the ensemble benchmarks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from operator import add
from typing import Any, cast
from unittest.mock import patch

from benchmarks.common import DRAFTER, Samples, alternate, prompts, timed
from cospec import LLM, SamplingParams
from cospec.ensemble.collaborative import Collaborative
from cospec.ensemble.proposer_policy import GoodputProposerPolicy
from cospec.models.model_runner import ModelRunner

Ids = list[list[int]]
OutputDistribution = Mapping[str, Any]
PROMPT = 192  # kept tokens of a prompt
PLAIN = {"method": "draft_model", "model": "zoo:drafter"}


@dataclass(frozen=True)
class Setting:
    """Models and their blend."""

    models: tuple[str, ...]
    ensemble: OutputDistribution


SETTINGS = {
    "weighted-two": Setting(("zoo", "zoo:target-prose"), {"method": "weighted", "weights": [0.5, 0.5]}),
    "weighted-three": Setting(("zoo", "zoo:target-prose", "zoo:target-code"), {"method": "weighted"}),
    "weighted-small": Setting(("zoo", "zoo:drafter"), {"method": "weighted", "weights": [0.7, 0.3]}),
    "contrastive": Setting(("zoo", "zoo:drafter"), {"method": "contrastive", "mu": 0.1}),
}


class ForwardClock:
    """Sums the seconds of the forwards of all models; of threads, one by one. Native steps of a target and one
    proposer are no such forwards, and blends of several members have none."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count for the time of the block."""
        forward, rollout = (timed(call, self._spend) for call in (ModelRunner.forward, ModelRunner.rollout))
        with patch.object(ModelRunner, "forward", forward), patch.object(ModelRunner, "rollout", rollout):
            yield

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds


FORWARDS = ForwardClock()  # it replaces methods of a class, so there is one


@dataclass
class Writer:
    """Generates with one engine, and counts the models' calls, the tokens and their seconds.

    Attributes:
        drafts: whether a drafter that is no member proposes chains; each of its tokens is a call of ``drafter``.
    """

    llm: LLM
    drafts: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0

    def write(self, ids: Ids, chosen: SamplingParams, ensemble: OutputDistribution | None = None) -> None:
        """Generate from all prompts together."""
        started, before = time.perf_counter(), FORWARDS.seconds
        outputs = self.llm.generate(ids, chosen, ensemble=ensemble)
        self.seconds += time.perf_counter() - started
        self.forward_seconds += FORWARDS.seconds - before
        for output in outputs:
            self.calls.update(output.stats.model_calls)
            if self.drafts:
                self.calls[DRAFTER] += output.stats.drafted
            self.tokens += len(output.outputs[0].token_ids)

    def calls_per_token(self) -> dict[str, float]:
        """Return the calls of each model, prompts included."""
        return {name: round(count / self.tokens, 3) for name, count in sorted(self.calls.items())}

    def ms_per_token(self) -> dict[str, float]:
        """Return the milliseconds of a token, and those in forwards. Forwards of threads count one by one."""
        return {
            name: round(1e3 * seconds / self.tokens, 4)
            for name, seconds in (("all", self.seconds), ("forwards", self.forward_seconds))
        }

    def reset(self) -> None:
        """Forget all counts."""
        self.calls, self.tokens, self.seconds, self.forward_seconds = Counter(), 0, 0.0, 0.0

    @property
    def proposer_policy(self) -> GoodputProposerPolicy:
        """Return the engine's proposer policy."""
        return cast(Collaborative, self.llm.engine.execution_mode).members.policy


def writer(setting: Setting, collaboration: OutputDistribution, batch: int, **more: Any) -> Writer:
    """Build an engine of the setting with the given proposal options, for a number of parallel requests."""
    models, ensemble = setting.models, setting.ensemble
    room: dict[str, Any] = {"max_num_seqs": batch, "kv_cache_memory_bytes": 256 << 20}
    llm = LLM(models=models, ensemble=ensemble, collaboration=collaboration, **room, **more)
    return Writer(llm, drafts="speculative_config" in more)


def time_writers(
    writers: Mapping[str, Writer],
    work: Sequence[Ids],
    chosen: SamplingParams,
    repeats: int,
    ensemble: OutputDistribution | None = None,
) -> Samples:
    """Return seconds of each writer for each piece of work, in random alternation."""
    timed = {name: lambda ids, one=one: one.write(ids, chosen, ensemble) for name, one in writers.items()}
    return alternate(timed, work, repeats)


@dataclass
class Times:
    """Seconds per writer for the same work: without and with the computation of prompts."""

    decoding: Samples
    whole: Samples


def time_decoding(
    writers: Mapping[str, Writer],
    work: Sequence[Ids],
    chosen: SamplingParams,
    repeats: int,
    ensemble: OutputDistribution | None = None,
) -> Times:
    """Time like ``time_writers``, with the prompts' time separate, because proposals do not speed up prompts.

    Each writer first generates one token for the prompts of a piece. Its cache then has all but the last page of the
    prompts for the timed run.
    """
    reading = Samples({name: [] for name in writers})
    first = replace(chosen, max_tokens=1)
    for ids in work:
        for name, one in writers.items():
            started = time.perf_counter()
            one.llm.generate(ids, first)
            reading.seconds[name].append(time.perf_counter() - started)
    decoding = time_writers(writers, work, chosen, repeats, ensemble)
    whole = {name: [*map(add, seconds, cycle(reading.seconds[name]))] for name, seconds in decoding.seconds.items()}
    return Times(decoding, Samples(whole))


def batches(llm: LLM, domain: str, batch: int, count: int) -> list[Ids]:
    """Return ``count`` groups of prompts that run together."""
    ids = [llm.encode(text)[:PROMPT] for text in prompts(domain, count * batch)]
    return [ids[start : start + batch] for start in range(0, len(ids), batch)]


def params(temperature: float, tokens: int) -> SamplingParams:
    """Return parameters for a fixed length; without a seed, so that sampled proposals are verified by probability."""
    return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)


def rounded(ratio: Sequence[float]) -> list[float]:
    """Return a rounded ratio and its interval."""
    return [round(value, 3) for value in ratio]
