"""CoS's claims in passing: equations of section 3.2, counts of calls, speeds of the abstract and section 4.2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.cos_theorems import naive_factor
from benchmarks.papers.collaborations import COLLABORATIVE, KERNELS, Collaborations, apart, clear, interval
from benchmarks.papers.common import Row, unclear
from benchmarks.papers.cos_settings import SETTINGS, Setting
from benchmarks.papers.cos_theory import Floats, drawn_pairs
from benchmarks.papers.dsd_tau import TAU
from benchmarks.papers.dsd_tau import at as at_tau
from benchmarks.papers.sources import Found, Results
from cospec.acceptance.rejection import Rejection
from cospec.core.types import Draft, TargetProbs
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.speedup_model import ProposalProcess
from cospec.models.toy import ToyModel
from cospec.verify.enumerated_draws import BranchingRandom, BranchTrace, enumerate_runs, total_variation

EXACT = 1e-12
SMALL = 0.3  # λ of the setting `weighted-small`
WRITTEN = 4  # tokens in the paper's example of calls
BATCHES = ((1, "one request"), (8, "eight requests"))
TASKS = ("code", "prose")  # ours for the paper's HumanEval and CNNDM
RIVALS = ("parallel", "plain")  # the methods of the paper's tables 2 and 3
WEIGHTED, CONTRASTIVE = "weighted", "contrastive"
ENSEMBLES: tuple[Mapping[str, Any], ...] = (
    {"method": WEIGHTED, "lambda": 0.5},
    {"method": WEIGHTED, "lambda": SMALL},
    {"method": CONTRASTIVE, "mu": 0.1},
)


def claims(results: Results) -> tuple[Row, ...]:
    """What the paper's text claims in passing, with a counterpart here."""
    return (
        *equations(results),
        *calls(results),
        *weights(results),
        *ranges(results),
        *comparisons(results),
        *never_slower(results),
    )


def equations(results: Results) -> tuple[Row, ...]:
    """Equations 7 and 10, and acceptance in an ensemble against that of speculative decoding."""
    q, r = drawn_pairs()
    accepted = np.divide(r, q, out=np.zeros_like(q), where=q > 0).clip(max=1.0)
    sides = (q * accepted).sum(-1), 1.0 - 0.5 * np.abs(q - r).sum(-1)
    plain = np.minimum(q, r).sum(-1)
    ensemble = np.minimum(q, SMALL * q + (1.0 - SMALL) * r).sum(-1)
    unlike = plain < 1.0 - EXACT
    greater = int((ensemble > plain)[unlike].sum())
    apart = float(np.abs(ensemble - (SMALL + (1.0 - SMALL) * plain)).max())
    return (
        results.computed(
            f"Section 3.2: acceptance rate α of proposals of q, over {len(q):,} drawn pairs of q and r",
            "1 − ½ Σ|q − r| (equation 7)",
            f"Σ q · min(1, r / q), by equation 6, differs by {tiny(float(np.abs(sides[0] - sides[1]).max()))}",
        ),
        results.computed(
            "Section 3.2: distribution of a written token",
            "the combined distribution (equation 10)",
            f"total variation {tiny(max(map(written_apart, ENSEMBLES)))}",
            "our acceptance method `rejection`, every draw enumerated; weighted and contrastive ensembles of two toy "
            "models; `tests/exactness/test_collaborative.py` has whole texts",
        ),
        results.computed(
            f"Section 3.2: acceptance with weight λ = {SMALL:g} of the proposer, over {len(q):,} drawn pairs",
            "greater than that of speculative decoding",
            f"greater in {greater:,} of {unlike.sum():,} pairs with α < 1; differs from λ + (1 − λ) α by {tiny(apart)}",
            "α is that of speculative decoding; the paper does not print λ + (1 − λ) α",
        ),
    )


def tiny(difference: float) -> str:
    """A difference in words; rounding errors, which depend on the processor, have no digits."""
    return f"less than {EXACT:.0e}" if difference < EXACT else f"{difference:.1e}"


def written_apart(ensemble: Mapping[str, Any]) -> float:
    """Total variation between written tokens and the combined distribution, the largest over all last tokens."""
    models = [ToyModel(4, order=1, seed=seed, sharpness=1.5) for seed in (1, 2)]
    blend, differences = build_blend(ensemble, len(models)), []
    for last in range(models[0].vocab_size):
        logits = [model.logits([last])[None] for model in models]
        q, r = (torch.softmax(rows[0].double(), -1).numpy() for rows in (logits[-1], blend.combine(logits)))
        found = enumerate_runs(partial(written, q=q, r=r))
        differences.append(total_variation(found, dict(enumerate(r.tolist()))))
    return max(differences)


def written(trace: BranchTrace, q: Floats, r: Floats) -> int:
    """The token after one proposal of ``q`` and its verification against ``r``."""
    token = trace.choose(q)
    draft = Draft("", 0, (token,), (-1,), ("",), q[None])
    draws: Any = BranchingRandom(trace, 0)
    result = Rejection().verify(draft, TargetProbs(probs=r[None]), draws)
    return token if result.token is None else result.token


def calls(results: Results) -> tuple[Row, ...]:
    """The paper's best and worst counts of calls, and the exact count."""
    counts = {
        alpha: [
            ProposalProcess((alpha, alpha), gammas, alternate=alternate).calls_per_token()
            for gammas, alternate in (((WRITTEN, 1), False), ((1, 1), True))
        ]
        for alpha in (0.0, 1.0)
    }
    naive, alternate = (round(WRITTEN * sum(each)) for each in counts[1.0])
    return (
        results.computed(
            f"Section 1: calls of two models for {WRITTEN} tokens, all proposals accepted",
            "standard 8, one proposer 5; alternate half of standard (figure 2)",
            f"one proposer {naive}, alternate {alternate} in the long run",
            f"one proposer has γ = {WRITTEN}, alternate has γ = 1; the first call of a text only proposes, so its "
            f"first {WRITTEN} tokens take {alternate + 1}",
        ),
        results.computed(
            f"Section 3.3: calls of two models for {WRITTEN} tokens, all proposals rejected",
            "with γ = 1 as many as standard, which are 8",
            f"{WRITTEN * sum(counts[0.0][1]):.0f}",
        ),
    )


def weights(results: Results) -> tuple[Row, ...]:
    """Corollary 3.4, and the acceptance of a proposer of a small weight."""
    small = next(setting for setting in SETTINGS if setting.name == "weighted-small")
    return (
        *(
            results.row(
                f"Corollary 3.4: λ against c / (1 + c), {setting.name}, T = {temperature:g}",
                "some γ is faster than standard if λ > c / (1 + c)",
                COLLABORATIVE,
                lambda found, s=setting, t=temperature: corollary(found, s, t),
                "λ is the proposer's weight; the speed at γ = 2 is theorem 3.1 with α = λ; measured is `naive` with "
                "the engine's lengths",
            )
            for setting in SETTINGS
            if setting.models == 2 and setting.name.startswith(WEIGHTED)
            for temperature in setting.temperatures
        ),
        results.row(
            f"Section 3.2: acceptance of a small proposer with weight {SMALL:g}, T = 1",
            "greater than that of speculative decoding",
            COLLABORATIVE,
            lambda found: small_acceptance(found, small),
            results.sentence(TAU, unweighted),
        ),
    )


def corollary(found: Found, setting: Setting, temperature: float) -> str:
    """The weight of the proposer and the paper's limit on each domain, and the speeds.

    Raises:
        KeyError: the run has no cost of a call.
    """
    cells = []
    for row in theories(found, setting, temperature):
        theory = row["theory"]
        c, weight = theory["c"], theory["bound"][theory["proposer"]]
        side = "above" if weight > c / (1.0 + c) else "not above"
        cells.append(
            f"{row['domain']} {weight:g} {side} {c / (1.0 + c):.2f} (at least {naive_factor(weight, 2, c):.2f}× at "
            f"γ = 2, measured {theory['naive measured']:.2f}×)"
        )
    return ", ".join(cells)


def small_acceptance(found: Found, setting: Setting) -> str:
    """The engine's estimate for the proposer on each domain.

    Raises:
        KeyError: the run has no estimates.
    """
    rows = {row["domain"]: row["theory"] for row in theories(found, setting, 1.0)}
    return ", ".join(f"{domain} {theory['alpha'][theory['proposer']]:.2f}" for domain, theory in rows.items())


def theories(found: Found, setting: Setting, temperature: float) -> list[Found]:
    """The domains with the theorems' quantities, one request at a time.

    Raises:
        KeyError: there are none.
    """
    rows = [row for row in Collaborations(found, setting.name).rows(temperature, 1) if "theory" in row]
    if not rows:
        raise KeyError("theory")
    return rows


def unweighted(found: Found) -> str:
    """The acceptance of the same drafter without a weight, and what the ensemble's would be by it."""
    alpha = at_tau(found, 0.0)["acceptance"]["value"]
    return (
        f"the engine's estimates on written texts; on reference answers the same drafter has α = {alpha:.2f} without a "
        f"weight, so λ + (1 − λ) α = {SMALL + (1.0 - SMALL) * alpha:.2f}"
    )


def ranges(results: Results) -> tuple[Row, ...]:
    """The speeds of the abstract and of section 1."""
    return tuple(
        results.row(
            f"Abstract, section 1: speed of the default over standard decoding, {words}{kernels}",
            "1.11 to 2.23×; weighted 1.34 to 1.85×, contrastive 1.11 to 2.23×" if batch == 1 else "",
            source,
            lambda found, batch=batch: kinds(found, batch),
            "all domains"
            + ("; the paper also has 1.27× (weighted, table 2) and 3.95× (contrastive, table 4)" if batch == 1 else ""),
        )
        for source, kernels in KERNELS.items()
        for batch, words in BATCHES
    )


def kinds(found: Found, batch: int) -> str:
    """The least and the greatest speed of the default over settings and temperatures, by kind of ensemble."""
    cells = []
    for kind in (WEIGHTED, CONTRASTIVE):
        speeds = [
            domains(found, setting, temperature, batch)["all"]["alternate"][0]
            for setting in SETTINGS
            if setting.name.startswith(kind)
            for temperature in setting.temperatures
        ]
        cells.append(f"{kind} {min(speeds):.2f} to {max(speeds):.2f}×")
    return ", ".join(cells)


def domains(found: Found, setting: Setting, temperature: float, batch: int = 1) -> dict[str, Found]:
    """The speeds of all methods over standard decoding, by domain.

    Raises:
        KeyError: the setting was not measured.
    """
    rows = Collaborations(found, setting.name).rows(temperature, batch)
    return {row["domain"]: row["over_standard"] for row in rows}


def comparisons(results: Results) -> tuple[Row, ...]:
    """The findings of section 4.2."""
    rows = []
    for source, kernels in KERNELS.items():
        rows += [
            results.row(
                f"Section 4.2: the default against the faster of parallel and plain{kernels}",
                "the default is the fastest in all settings of tables 2 and 3",
                source,
                fastest,
                "all domains; SD is as fast once in tables 4 and 10 each; one proposer is faster once in table 8",
            ),
            results.row(
                f"Section 4.2: least speed of the default on a domain{kernels}",
                "weighted 1.34× (two models) and 1.27× (three), contrastive 1.11×",
                source,
                least,
                "one request; the paper says that weighted ensembles ensure the higher minimum",
            ),
            results.row(
                f"Section 4.2: speed of the default by task, T = 1{kernels}",
                "weighted: HumanEval 1.65×, the highest; CNNDM 1.36× (table 2), 1.43× (by table 5, computed)",
                source,
                by_task,
                results.sentence(source, faster_task),
            ),
        ]
    return tuple(rows)


def fastest(found: Found) -> str:
    """The speed of the default and of the faster other method of the paper's tables, by setting."""
    cells = []
    for setting in SETTINGS:
        for temperature in setting.temperatures:
            rows = Collaborations(found, setting.name).rows(temperature, 1)
            (row,) = (row for row in rows if row["domain"] == "all")
            speeds = row["over_standard"]
            best, name = max((speeds[name], name) for name in RIVALS)
            own = speeds["alternate"]
            doubt = "" if clear(row, name) else ", no clear difference"
            cells.append(f"{setting.name}, T = {temperature:g}: {own[0]:.2f}× against {best[0]:.2f}× ({name}{doubt})")
    return "; ".join(cells)


def by_task(found: Found) -> str:
    """The speed of the default on code and on prose, by setting."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{domain} {interval(speed)}" for domain, speed in zip(TASKS, pair, strict=True))
        for name, pair in tasks(found).items()
    )


def faster_task(found: Found) -> str:
    """In how many settings prose is faster than code, and in how many the two differ clearly."""
    pairs = tasks(found).values()
    faster, differ = sum(code[0] < prose[0] for code, prose in pairs), sum(apart(*pair) for pair in pairs)
    return (
        f"the paper explains it by the determinism of outputs; here prose is the faster one in {faster} of "
        f"{len(pairs)} settings, and the two differ clearly in {differ}"
    )


def tasks(found: Found) -> dict[str, list[tuple[float, ...]]]:
    """The speeds of the default on ``TASKS`` at temperature 1, with intervals, by setting.

    Raises:
        KeyError: a setting was not measured.
    """
    speeds = {setting.name: domains(found, setting, 1.0) for setting in SETTINGS}
    return {name: [tuple(each[task]["alternate"]) for task in TASKS] for name, each in speeds.items()}


def least(found: Found) -> str:
    """The least speed of the default on a domain, by setting."""
    cells = []
    for setting in SETTINGS:
        speeds = [
            each["alternate"][0]
            for temperature in setting.temperatures
            for domain, each in domains(found, setting, temperature).items()
            if domain != "all"
        ]
        if not speeds:
            raise KeyError(setting.name)
        at = " and ".join(f"{temperature:g}" for temperature in setting.temperatures)
        cells.append(f"{setting.name} {min(speeds):.2f}× (T = {at})")
    return ", ".join(cells)


def never_slower(results: Results) -> tuple[Row, ...]:
    """The abstract, and corollaries 3.5 and 3.7."""
    return tuple(
        results.row(
            f"Abstract, corollaries 3.5 and 3.7: least speed of the default over standard decoding, {words}{kernels}",
            "never slower than standard collaborative decoding",
            source,
            lambda found, batch=batch: slowest(found, batch),
            "all domains; the corollaries say that lengths exist which are not slower, if a call takes one time for "
            "any number of tokens",
        )
        for source, kernels in KERNELS.items()
        for batch, words in BATCHES
    )


def slowest(found: Found, batch: int) -> str:
    """The setting with the least speed of the default, and the speed."""
    speeds = {setting.name: Collaborations(found, setting.name).least(batch) for setting in SETTINGS}
    name = min(speeds, key=lambda each: speeds[each])
    middle, low, high = speeds[name]
    return f"{middle:.2f}× ({low:.2f} to {high:.2f}{unclear(low, high)}) with {name}"
