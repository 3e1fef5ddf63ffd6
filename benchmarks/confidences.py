"""Acceptance by a draft token's probability under its drafter, by position, and by length of the drafts.

Run ``python -m benchmarks.confidences``. CoSine figure 3(b) has acceptance by probability and position. SmartSpec
figure 17 has the confidences of accepted and of rejected tokens, Minions figure 1 acceptance by speculation length.
Drafts are chains of a fixed length, on the prompts of ``benchmarks.pool``.

``benchmarks/draft_recorder.py`` says what *confidence* is. ``rejection`` verifies the drafts. A token is *judged* if
all tokens before were accepted and the output did not end. The target does not decide about the other tokens;
``accepted / drafted`` counts the other tokens as not accepted.

Intervals are 95%, over resampled prompts. Tenths of confidence are of all tokens, so a resample keeps their bounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import DOMAINS, mean_over_texts, prompts, write
from benchmarks.draft_recorder import DraftRecorder, Floats, Token, recording_engine
from benchmarks.pool import DRAFTERS, member
from cospec import SamplingParams
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.text.input_processor import make_requests

LENGTHS, LENGTH = (1, 2, 4, 6, 8, 12), 4
TEMPERATURES = (0.0, 0.8)
TENTHS = 10
ALL = "all"  # domains
BINS = 1000  # of the confidences, for the comparison of accepted with rejected tokens
Ints = npt.NDArray[np.integer]


def run(
    engine: Engine, recorder: DraftRecorder, length: int, texts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Token]:
    """The draft tokens of all prompts at one length."""
    recorder.length, recorder.tokens = length, []
    for number, text in enumerate(texts):
        (request,) = make_requests(str(number), text, params)
        engine.add(replace(request, seed=number))
    while engine.has_work:
        engine.step()
    return recorder.tokens


def by_prompt(tokens: Sequence[Token], parts: Callable[[Token], tuple[float, float]]) -> dict[str, float]:
    """A ratio of sums over tokens, with its interval over prompts."""
    sums: dict[int, Floats] = {}
    for token in tokens:
        sums[token.prompt] = sums.get(token.prompt, np.zeros(2)) + parts(token)
    above, below = np.array(list(sums.values())).T
    return dict(zip(("value", "low", "high"), mean_over_texts(above.tolist(), below.astype(int).tolist()), strict=True))


def acceptance(tokens: Sequence[Token]) -> dict[str, Any]:
    """Accepted over judged tokens, and accepted over drafted tokens."""
    judged = [token for token in tokens if token.accepted is not None]
    return {
        "drafted_tokens": len(tokens),
        "judged_tokens": len(judged),
        "accepted_over_judged": by_prompt(judged, lambda token: (bool(token.accepted), 1)),
        "accepted_over_drafted": by_prompt(tokens, lambda token: (bool(token.accepted), 1)),
    }


def by_confidence(tokens: Sequence[Token]) -> dict[str, Any]:
    """Acceptance by tenth of confidence, and the confidences of accepted and of rejected tokens."""
    judged = [token for token in tokens if token.accepted is not None]
    values, accepted, owners = columns(judged)
    histograms = np.zeros((owners.max() + 1, 2, BINS))
    np.add.at(histograms, (owners, accepted, np.minimum((values * BINS).astype(int), BINS - 1)), 1)
    found: dict[str, Any] = {
        "tenths": by_tenth(judged),
        "top_over_all": top_over_all(judged),
        "top_over_all_drafted": top_over_all(tokens),
        "accepted_above_rejected": resampled(histograms, above),
    }
    for kind, name in enumerate(("rejected", "accepted")):
        own_values = values[accepted == kind]
        shares = np.histogram(own_values, TENTHS, (0.0, 1.0))[0] / max(1, len(own_values))
        found[name] = {"quartiles": np.quantile(own_values, (0.25, 0.5, 0.75)).tolist(), "shares": shares.tolist()}
    return found


def by_tenth(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Acceptance in each tenth of confidence, and the tenth's bounds."""
    edges, tenths = tenths_of(columns(tokens)[0])
    rows = []
    for tenth in range(TENTHS):
        own = [token for token, place in zip(tokens, tenths, strict=True) if place == tenth]
        if own:
            ratio = by_prompt(own, lambda token: (bool(token.accepted), 1))
            rows.append({"from": edges[tenth], "to": edges[tenth + 1], "tokens": len(own), "acceptance": ratio})
    return rows


def top_over_all(tokens: Sequence[Token]) -> dict[str, float]:
    """The accepted share of the tenth with the highest confidences over the accepted share of all ``tokens``."""
    values, accepted, owners = columns(tokens)
    top = tenths_of(values)[1] == TENTHS - 1
    counts = np.zeros((owners.max() + 1, 4))
    for column, part in enumerate((top * accepted, top, accepted, np.ones_like(accepted))):
        np.add.at(counts[:, column], owners, part)
    return resampled(counts, lambda sums: float((sums[0] / sums[1]) / (sums[2] / sums[3])))


def columns(tokens: Sequence[Token]) -> tuple[Floats, Ints, Ints]:
    """Confidences, whether tokens were accepted, and their prompts' numbers without gaps; each ``[N]``."""
    values = np.array([token.confidence for token in tokens])
    accepted = np.array([bool(token.accepted) for token in tokens], dtype=np.int64)
    return values, accepted, np.unique([token.prompt for token in tokens], return_inverse=True)[1]


def tenths_of(values: Floats) -> tuple[Floats, Ints]:
    """The bounds of the tenths ``[TENTHS + 1]``, and the tenth of each value, from 0."""
    edges = np.quantile(values, np.linspace(0, 1, TENTHS + 1))
    return edges, np.searchsorted(edges[1:-1], values, side="right")


def above(sums: Floats) -> float:
    """The probability that an accepted token has a higher confidence than a rejected token, from ``sums [2, BINS]``.

    Tokens in the same bin count one half. 0.5: confidence says nothing; 1: the two kinds do not overlap.
    """
    rejected, accepted = sums
    below = np.cumsum(rejected) - 0.5 * rejected
    return float((accepted * below).sum() / (accepted.sum() * rejected.sum()))


def resampled(columns: Floats, figure: Callable[[Floats], float], draws: int = 1000) -> dict[str, float]:
    """A figure of sums over prompts ``columns [P, ...]``, with its interval over resampled prompts."""
    count = len(columns)
    picks = np.random.default_rng(0).integers(count, size=(draws, count))
    times = np.stack([np.bincount(pick, minlength=count) for pick in picks])  # how often each prompt was drawn
    sums = (times @ columns.reshape(count, -1)).reshape(draws, *columns.shape[1:])
    with np.errstate(invalid="ignore"):  # a resample may lack tokens of one kind
        found = [figure(each) for each in sums]
    low, high = np.nanquantile(found, [0.025, 0.975])
    return {"value": float(figure(columns.sum(0))), "low": float(low), "high": float(high)}


def main() -> None:
    """Measure, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo")
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), help="the first one drafts all lengths")
    parser.add_argument("--prompts", type=int, default=48, help="of each domain")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="requests at a time")
    parser.add_argument("--name", default="confidences")
    options = parser.parse_args()
    lengths_of: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for drafter in options.drafters:
        engine, recorder = recording_engine(config_of(options, drafter))
        texts = [engine.tokenizer.encode(text) for domain in DOMAINS for text in prompts(domain, options.prompts)]
        lengths = LENGTHS if drafter == options.drafters[0] else (LENGTH,)
        for temperature, length in product(TEMPERATURES, lengths):
            params = SamplingParams(temperature=temperature, max_tokens=options.tokens)
            tokens = run(engine, recorder, length, texts, params)
            about = {"drafter": drafter, "temperature": temperature, "length": length}
            for number, domain in enumerate((*DOMAINS, ALL)):
                own = [token for token in tokens if domain == ALL or token.prompt // options.prompts == number]
                lengths_of.append({**about, "domain": domain, **acceptance(own)})
            if length == LENGTH:
                rows.append({**about, **by_confidence(tokens), "positions": positions(tokens)})
            print(about, lengths_of[-1]["accepted_over_drafted"], flush=True)
    print(write(options.name, {"options": vars(options), "lengths": lengths_of, "rows": rows}))


def config_of(options: argparse.Namespace, drafter: str) -> EngineConfig:
    """The engine of one drafter, with room for the longest drafts."""
    given = {key: value for key, value in member(drafter).items() if key != "name"}
    fixed = {"policy": "recorder", "num_speculative_tokens": max(LENGTHS), "acceptance_method": "rejection"}
    return EngineConfig.build(
        {"model": options.model, "max_num_seqs": options.batch, "speculative_config": {**given, **fixed}}
    )


def positions(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Acceptance of judged tokens by confidence at each position of the draft."""
    judged = [token for token in tokens if token.accepted is not None]
    found = [[token for token in judged if token.position == place] for place in range(LENGTH)]
    return [
        {"position": place + 1, "tenths": by_tenth(own), "top_over_all": top_over_all(own)}
        for place, own in enumerate(found)
    ]


if __name__ == "__main__":
    main()
