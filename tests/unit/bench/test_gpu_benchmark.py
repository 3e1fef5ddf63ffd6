"""The figures and the models of ``benchmarks.gpu``."""

import pytest
import torch
from benchmarks.gpu_models import SHAPES, fit_overlap, make_drafter, make_model
from benchmarks.gpu_run import figures, measure, ratio
from benchmarks.gpu_systems import Clock, Work

TINY = SHAPES["tiny"]


def test_a_step_is_the_difference_of_both_runs() -> None:
    piece = Work([[2], [3]], 8)
    found = figures({"cospec": [0.4, 1.0, 0.6, 1.2], "static": [0.8, 2.0, 1.0, 2.2]}, piece, 2)
    assert found["cospec"]["step_ms"] == pytest.approx(100)
    assert found["cospec"]["tokens_per_s"] == pytest.approx(16 / 1.1)
    assert found["static"]["step_ms_samples"] == pytest.approx([200, 200])
    assert found["static"]["step_ratio"]["ratio"] == pytest.approx(2)


def test_a_ratio_needs_positive_times() -> None:
    assert ratio([1.0, 2.0], [0.5, -0.1]) is None
    assert ratio([], []) is None


def test_other_systems_go_on_after_an_error() -> None:
    def fails(work: Work) -> list[int]:
        raise ValueError("no\nkernel")

    systems = {"cospec": lambda work: [work.tokens], "static": fails, "short": lambda work: [1]}
    found = measure(systems, [Work([[2]], 4)] * 2, Clock(60), "test", 0)
    assert len(found["cospec"]["seconds"]) == 2
    assert found["static"] == {"error": "ValueError: no kernel"}
    assert "needs 4" in found["short"]["error"]


def test_weights_of_a_shape_are_those_of_the_model() -> None:
    model = make_model(TINY, "cpu")
    products = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(products) == TINY.weights_read
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_scale_brings_the_target_closer_to_its_drafter() -> None:
    model = make_model(TINY, "cpu")
    drafter = make_drafter(model, TINY, "cpu")
    scale, overlap = fit_overlap(model, drafter, TINY, goal=0.99)
    assert 0 < scale < 1
    assert overlap == pytest.approx(0.99, abs=0.02)
