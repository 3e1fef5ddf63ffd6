"""``cospec verify --plugin``: the checks pass for right plug-ins of a user, and fail for wrong ones."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cospec.registry import ACCEPTANCE_METHODS, BLENDS, DRAFTERS, LOGITS_PROCESSORS, POLICIES
from cospec.sampling_params import SamplingParams
from cospec.verify.chisquare import TOP_K
from cospec.verify.context import QUICK
from harness.llamas import distribution_of

pytestmark = pytest.mark.usefixtures("small_second_sample")
Command = Callable[..., Result]
Checks = dict[str, dict[str, Any]]
Verify = Callable[..., Checks]

MODULE = "plugins_of_a_user"
PLUGINS = """
from dataclasses import replace

import torch

import cospec
from cospec.acceptance.rejection import Rejection
from cospec.rng.random_streams import StreamKind
from cospec.core.plugin_base import LogitsProcessor
from cospec.core.types import VerifyResult
from cospec.logits_processors.bitmask import ban
from cospec.plugin_options import Options
from cospec.policies.fixed import Fixed
from cospec.verify.controls import EvenDrafter, NoResidual


class Right(Rejection):
    name = "right"


class Wrong(NoResidual):
    name = "wrong"


class KeepsAll(Rejection):
    name = "keeps-all"
    stream_kind = StreamKind.TARGET

    def verify(self, draft, target, draws):
        n = len(draft)
        return VerifyResult(tuple(range(n)), target.draw(n, draft.base_len + n, draws), True)


class Raises(Rejection):
    name = "raises"

    def verify(self, draft, target, draws):
        raise IndexError("there is no such row")


class GuessOptions(Options):
    tokens: list[int]


class Guess(EvenDrafter):
    Options = GuessOptions

    @classmethod
    def build(cls, options, host):
        made = cls(options.tokens, host.target.vocab_size)
        made.first = options.tokens[:1]
        return made


class Liar(Guess):
    # always drafts the first token, and claims to have drawn the token
    def propose(self, contexts, budgets):
        return [replace(draft, tokens=(*self.first * len(draft),)) for draft in super().propose(contexts, budgets)]


class Trims(Fixed):
    # keeps some drafts, by what was known before
    keeps_drafts = False
    horizon = 1

    def trim(self, drafts):
        return [draft for draft in drafts if draft.base_len % 3]


class Peeks(Trims):
    # keeps some drafts, by what was drawn
    def trim(self, drafts):
        return [draft for draft in drafts if draft.tokens[0] % 2]


def mean(logits):
    return torch.stack([torch.log_softmax(rows.double(), -1) for rows in logits]).mean(0)


def mixed(logits):
    # rows depend on each other, which no blend may do
    return mean(logits) - mean(logits).mean(0) / 2


def raising(logits):
    raise IndexError("there is no such row")


class NoOptions(Options):
    pass


class Rising(LogitsProcessor):
    # allows tokens that differ from all tokens of the output
    name = "rising"
    masks = True
    Options = NoOptions

    @classmethod
    def build(cls, options, sampling):
        return cls()

    def start(self, prompt):
        return frozenset()

    def advance(self, state, token):
        return state | {token}

    def mask(self, state, vocab_size):
        return ban(sorted(state), vocab_size)


class Overwrites(Rising):
    # changes the given state, which belongs to other paths too
    name = "overwrites"

    def start(self, prompt):
        return set()

    def advance(self, state, token):
        state.add(token)
        return state


class Remembers(Rising):
    # bans what any path had, rejected tokens too
    name = "remembers"

    def __init__(self):
        self.seen = set()

    def advance(self, state, token):
        self.seen.add(token)
        return frozenset(self.seen)


for processor in (Rising, Overwrites, Remembers):
    cospec.register_logits_processor(processor.name, processor)
for method in (Right, Wrong, KeepsAll, Raises):
    cospec.register_acceptance_method(method.name, method)
for name, drafter in (("guess", Guess), ("liar", Liar)):
    cospec.register_drafter(name, drafter)
for name, policy in (("trims", Trims), ("peeks", Peeks)):
    cospec.register_policy(name, policy)
for blend in (mean, mixed, raising):
    cospec.register_blend(blend.__name__, blend)
"""
NAMES = (
    (ACCEPTANCE_METHODS, ("right", "wrong", "keeps-all", "raises")),
    (DRAFTERS, ("guess", "liar")),
    (POLICIES, ("trims", "peeks")),
    (BLENDS, ("mean", "mixed", "raising")),
    (LOGITS_PROCESSORS, ("rising", "overwrites", "remembers")),
)
FAILED = "requests, no request fails"
ENGINES_DRAFTER, EVEN_DRAFTER = "the engine's drafter", "an even drafter"


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that only the command imports, and less effort."""
    (tmp_path / f"{MODULE}.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("cospec.verify.suite.QUICK", replace(QUICK, prompts=2, tokens=12, length=2))
    yield
    sys.modules.pop(MODULE, None)
    for table, names in NAMES:
        for name in names:
            table.unregister(name)


@pytest.fixture
def verify(cospec_command: Command, tmp_path: Path) -> Verify:
    """The checks of a command by group and name; the exit status says whether all passed."""

    def call(*arguments: object) -> Checks:
        to = tmp_path / "checks.json"
        result = cospec_command("verify", *arguments, "--quick", "--threads", 1, "--plugin", MODULE, "--json", to)
        checks: Checks = {f"{one['check_group']}, {one['name']}": one for one in json.loads(to.read_text())["checks"]}
        assert result.exit_code == (1 if failed(checks) else 0), result.output
        return checks

    return call


def failed(checks: Checks) -> set[str]:
    return {name for name, check in checks.items() if not check["passed"]}


def sampled(acceptance_method: str, drafter: str) -> str:
    return f"chi-square, acceptance method {acceptance_method}, {drafter}"


def drafts_are_judged(check: dict[str, Any]) -> bool:
    """Whether the sample says something about the drafts: some are accepted, and some are not."""
    counts = re.match(r"(\d+) of (\d+) draft tokens were accepted", check["notes"][0])
    return counts is not None and 0 < int(counts[1]) < int(counts[2])


def with_model(drafter: Path, **options: str) -> tuple[str, str]:
    return "--speculative-config", json.dumps({"method": "draft_model", "model": str(drafter), **options})


def with_method(drafter: Path, name: str) -> tuple[str, str]:
    return with_model(drafter, acceptance_method=name)


def with_drafter(target: Path, name: str) -> tuple[str, str]:
    """A drafter that draws from the likeliest second tokens of the sampled outputs."""
    likely = Counter[int]()
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=2)
    for tokens, mass in distribution_of(target, params, (0, 0, 0), 2).items():  # each of three words is t0
        assert isinstance(tokens, tuple)
        likely[tokens[1]] += round(mass * 1e9)
    config = {"method": name, "tokens": [token for token, _ in likely.most_common(4)]}
    return "--speculative-config", json.dumps(config)


def with_blend(name: str) -> tuple[str, ...]:
    return "--ensemble", json.dumps({"method": name}), "--collaboration", json.dumps({"gamma": 2})


def test_a_right_acceptance_method_of_a_plugin_passes(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_method(spelled[1], "right"))
    assert failed(checks) == set()
    assert all(drafts_are_judged(checks[sampled("right", one)]) for one in (ENGINES_DRAFTER, EVEN_DRAFTER))


@pytest.mark.parametrize(("name", "drafter"), [("wrong", EVEN_DRAFTER), ("keeps-all", ENGINES_DRAFTER)])
def test_a_wrong_acceptance_method_of_a_plugin_fails(
    verify: Verify, spelled: tuple[Path, Path], name: str, drafter: str
) -> None:
    found = failed(verify(spelled[0], *with_method(spelled[1], name)))
    assert {f"enumeration, acceptance method {name}, chosen drafts", sampled(name, drafter)} <= found
    assert not any("control" in each or "invariance" in each for each in found), "another method runs there"


def test_a_right_drafter_of_a_plugin_passes(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_drafter(spelled[0], "guess"))
    assert failed(checks) == set()
    assert all(drafts_are_judged(checks[sampled(method, ENGINES_DRAFTER)]) for method in ("match", "block"))


def test_a_wrong_drafter_of_a_plugin_fails(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_drafter(spelled[0], "liar"))
    assert failed(checks) == {sampled("block", ENGINES_DRAFTER)}


def test_a_right_policy_of_a_plugin_passes(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_model(spelled[1], policy="trims"))
    assert failed(checks) == set()
    assert all(drafts_are_judged(checks[sampled(method, ENGINES_DRAFTER)]) for method in ("match", "block"))


def test_a_policy_of_a_plugin_that_trims_by_drawn_tokens_fails(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_model(spelled[1], policy="peeks"))
    assert failed(checks) == {sampled("block", ENGINES_DRAFTER)}


def test_a_right_blend_of_a_plugin_passes(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(*spelled, *with_blend("mean"))
    assert failed(checks) == set()
    assert all(drafts_are_judged(checks[sampled(method, ENGINES_DRAFTER)]) for method in ("match", "block"))


def test_a_wrong_blend_of_a_plugin_fails(verify: Verify, spelled: tuple[Path, Path]) -> None:
    found = failed(verify(*spelled, *with_blend("mixed")))
    assert "enumeration, acceptance method block, chosen drafts" in found
    assert {sampled("match", ENGINES_DRAFTER), sampled("block", ENGINES_DRAFTER)} <= found


def test_an_acceptance_method_that_raises_fails(verify: Verify, spelled: tuple[Path, Path]) -> None:
    """The command ends, names the error, and goes on with the checks of ``match``."""
    checks = verify(spelled[0], *with_method(spelled[1], "raises"))
    assert failed(checks) == {FAILED}
    assert "IndexError: there is no such row" in checks[FAILED]["notes"][0]
    assert "drafter invariance, length 4, batch 4" in checks


def test_a_blend_that_raises_is_one_sentence(cospec_command: Command, spelled: tuple[Path, Path]) -> None:
    result = cospec_command("verify", *spelled, *with_blend("raising"), "--quick", "--plugin", MODULE)
    assert result.exit_code == 1
    assert "cospec: ensemble raising is a function that raised IndexError: there is no such row" in result.stderr


def test_a_right_logits_processor_of_a_plugin_passes(verify: Verify, spelled: tuple[Path, Path]) -> None:
    checks = verify(spelled[0], *with_model(spelled[1]), "--logits-processors", '{"rising": {}}')
    assert failed(checks) == set()
    assert len([name for name in checks if name.startswith("logits processors")]) == 6


@pytest.mark.parametrize("name", ["overwrites", "remembers"])
def test_a_logits_processor_of_a_plugin_that_keeps_rejected_tokens_fails(
    verify: Verify, spelled: tuple[Path, Path], name: str
) -> None:
    checks = verify(spelled[0], *with_model(spelled[1]), "--logits-processors", json.dumps({name: {}}))
    assert any("drafts of 4 = transformers" in check for check in failed(checks))
    assert all(check.startswith("logits processors") for check in failed(checks))


def test_an_unknown_logits_processor_is_one_sentence(cospec_command: Command, spelled: tuple[Path, Path]) -> None:
    result = cospec_command("verify", spelled[0], "--quick", "--logits-processors", '{"absent": {}}')
    assert result.exit_code == 1 and "logits_processors" in result.stderr and "absent" in result.stderr
