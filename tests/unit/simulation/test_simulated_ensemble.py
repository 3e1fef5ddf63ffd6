"""Simulated ensembles: the engine's own proposals and blends against CoS's formulas and against recorded choices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cos_theorems import alternate_factor, expected_tokens, naive_factor

from cospec.ensemble.speedup_model import ProposalProcess
from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.simulation.recorded_drafts import read_recording
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

DRAFTS = Path(__file__).resolve().parents[3] / "examples" / "scenarios" / "zoo-drafts.npz"
LARGE, SMALL, C = 0.9, 0.8, 0.2  # acceptance of each member's proposals; time of the small over the large
TOLERANCE = 0.02
MEMBERS = [
    {"name": "large", "acceptance": LARGE},
    {"name": "small", "acceptance": SMALL, "cost": {"fixed": 0.01 * C}},
]
STANDARD: dict[str, Any] = {"proposal": "standard"}
Run = dict[str, Any]


def runs(variants: Mapping[str, Mapping[str, Any]], target: Mapping[str, Any] = {}, **changes: Any) -> list[Run]:
    """The runs of variants, each with its ``collaboration`` or other keys; one request at a time."""
    given = {
        "requests": 6, "target": {"cost": {"fixed": 0.01}, "members": MEMBERS, **target},
        "domains": [{"prompt": {"mean": 1}, "output": {"mean": 500}}],
        "arrivals": {"kind": "closed", "concurrency": [1]},
        "variants": [{"name": name, **own} for name, own in variants.items()],
    }  # fmt: skip
    found: list[Run] = simulate(parse(Scenario, {**given, **changes}))["runs"]
    return found


def factor(collaboration: Mapping[str, Any], **changes: Any) -> float:
    """Speed over standard collaborative decoding."""
    variants: dict[str, Any] = {"standard": {"collaboration": STANDARD}, "own": {"collaboration": collaboration}}
    standard, own = runs(variants, **changes)
    return float(own["throughput"] / standard["throughput"])


@pytest.mark.parametrize("gamma", [2, 4, 8])
def test_one_proposer_has_the_speed_of_the_theorem(gamma: int) -> None:
    """CoS theorem 3.1; a proposal of another length or acceptance has another speed."""
    found = factor({"proposal": "naive", "gamma": gamma, "proposer": 1})
    assert found == pytest.approx(naive_factor(SMALL, gamma, C), rel=TOLERANCE)
    assert found != pytest.approx(naive_factor(SMALL - 0.1, gamma, C), rel=TOLERANCE)
    assert found != pytest.approx(naive_factor(SMALL, gamma + 1, C), rel=TOLERANCE)


def test_alternate_proposals_have_the_predicted_speeds() -> None:
    """CoS theorem 3.6 neglects that a scorer's proposal may be all that is pending; the exact process does not."""
    found = factor({"proposal": "alternate", "gamma": [1, 4], "proposer": 1})
    process = ProposalProcess((LARGE, SMALL), (1, 4), 1, True)
    assert found == pytest.approx(process.factor((1.0, C)), rel=TOLERANCE)
    assert found == pytest.approx(alternate_factor(SMALL, 4, C, 1, LARGE), rel=2 * TOLERANCE)
    assert found != pytest.approx(naive_factor(SMALL, 4, C), rel=2 * TOLERANCE)


def test_a_blend_of_one_member_is_speculative_decoding() -> None:
    """The member with all weight is always right, and gives a bonus token."""
    only = {"ensemble": {"method": "weighted", "lambda": 0.0}}
    found = factor({"proposal": "naive", "gamma": 4, "proposer": 1}, target=only)
    tokens = expected_tokens(SMALL, 5)  # a proposal's accepted tokens, and one more
    assert found == pytest.approx(tokens / (1 + 4 * C), rel=TOLERANCE)
    assert found != pytest.approx(expected_tokens(SMALL, 4) / (1 + 4 * C), rel=TOLERANCE)


def test_standard_decoding_takes_all_members_and_threads_the_slowest() -> None:
    short = [{"prompt": {"mean": 1}, "output": {"mean": 10}}]
    variants = {name: {"collaboration": {"proposal": name}} for name in ("standard", "parallel")}
    standard, parallel = runs(variants, requests=1, domains=short)
    assert standard["latency"]["mean"] == pytest.approx(10 * 0.012, abs=1e-6)
    assert parallel["latency"]["mean"] == pytest.approx(10 * 0.01, abs=1e-6)


@pytest.mark.parametrize("execution_mode", ["sequential", "draft-ahead", "draft-for-outcomes"])
def test_a_drafter_that_is_no_member_drafts_for_the_ensemble(execution_mode: str) -> None:
    """Each step is one call of every member; α is the drafter's."""
    own = {"num_speculative_tokens": 3, "policy": "fixed", "execution_mode": execution_mode}
    drafting = {"cost": {"fixed": 0.001}}
    (found,) = runs({"own": own}, drafting=drafting, domains=[{"acceptance": 0.6, "output": {"mean": 400}}])
    assert found["mean_acceptance_length"] == pytest.approx(expected_tokens(0.6, 4), rel=0.05)


def accepted_share(drafter: str, gamma: int, requests: int) -> float:
    """Accepted proposals over all that were verified, counted by the recorded drafter's own choices."""
    recording, accepted, rejected = read_recording(DRAFTS), 0, 0
    member = recording.member(drafter)
    for request in recording.requests[:requests]:
        first = recording.tokens[member, request.first : request.first + len(request.output), 0]
        right, place = (first == request.output).tolist(), 0
        while place < len(right):
            ahead = [*right[place : place + gamma], False]
            kept = min(ahead.index(False), len(ahead) - 1)
            wrong = kept < len(ahead) - 1
            accepted, rejected, place = accepted + kept, rejected + wrong, place + kept + wrong
    return accepted / (accepted + rejected)


def test_recorded_members_agree_where_the_recording_agrees() -> None:
    """The last proposals of an output may reach past its end, hence the tolerance."""
    (found,) = runs(
        {"own": {"collaboration": {"proposal": "naive", "gamma": 3, "proposer": 1}}},
        {"members": [{"name": "generic"}, {"name": "math"}]}, requests=12, recording=str(DRAFTS),
    )  # fmt: skip
    assert found["acceptance"] == pytest.approx(accepted_share("math", 3, 12), abs=0.02)
    assert found["acceptance"] != pytest.approx(accepted_share("generic", 3, 12), abs=0.02)


def test_a_batch_of_requests_keeps_outputs_and_counts() -> None:
    """The proposer policy chooses by simulated times, and repeats itself."""
    batch: dict[str, Any] = {"arrivals": {"kind": "closed", "concurrency": [4]}, "requests": 12}
    auto: dict[str, Any] = {"auto": {"collaboration": {}}, "standard": {"collaboration": STANDARD}}
    first, standard = runs(auto, **batch)
    assert [first, standard] == runs(auto, **batch)
    assert first["requests"] == 12
    assert first["throughput"] > 1.3 * standard["throughput"]


MISTAKES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"ensemble": {"method": "contrastive", "mu": 0.1}}, "target.ensemble.method is 'contrastive'"),
    ({}, {"members": [{"name": "a"}, {"name": "b"}]}, "target.members acceptance of a is missing"),
    ({}, {"members": []}, "collaboration of variant v is given"),
    ({}, {"overhead": 0.001}, "target is "),
    ({"gamma": [1, 2, 3]}, {}, "collaboration.gamma is [1, 2, 3]"),
]


@pytest.mark.parametrize(("collaboration", "target", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_named(collaboration: dict[str, Any], target: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        runs({"v": {"collaboration": collaboration}}, target)
    assert str(caught.value).startswith(sentence)
