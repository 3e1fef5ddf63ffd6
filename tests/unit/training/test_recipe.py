from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from cospec.errors import InvalidInput
from cospec.training.recipe import TrainingSchedule, load_recipe
from cospec.training.trainer import rate


def test_the_shipped_recipe_loads_by_name_and_by_path(tmp_path: Path) -> None:
    recipe = load_recipe("zoo")
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(str(copy)) == recipe


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: x", "vocab_size is missing"),
        ("- a list", "object"),
        ("a: [", "YAML"),
        ("vocab_size: 5\nname: x\ncontext: 1\nmixture: {}", "vocab_size"),
    ],
)
def test_a_bad_recipe_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=named):
        load_recipe(str(path))


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**load_recipe("zoo").model_dump(mode="json"), "speed": 3}))
    with pytest.raises(InvalidInput, match=r"recipe\.speed"):
        load_recipe(str(path))


def test_an_unknown_recipe_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="'zou'"):
        load_recipe("zou")


def test_the_rate_rises_stays_and_falls() -> None:
    schedule = TrainingSchedule(tokens=1000, warmup=0.1, decay=0.4)
    shares = [rate(done, schedule) for done in range(0, 1001, 50)]
    assert shares[0] == 0 and shares[1] == pytest.approx(0.5)
    assert shares[2:13] == pytest.approx([1.0] * 11)
    assert shares[16] == pytest.approx(0.5) and shares[20] == 0
    assert all(a >= b for a, b in pairwise(shares[12:]))


def test_the_rate_without_warm_up_or_decay_is_the_peak() -> None:
    schedule = TrainingSchedule(tokens=1000, warmup=0, decay=0)
    assert [rate(done, schedule) for done in (1, 500, 1000, 2000)] == [1, 1, 1, 1]
