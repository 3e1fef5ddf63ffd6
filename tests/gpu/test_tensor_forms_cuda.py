"""On a CUDA device the engine verifies where the logits are, with the results of the readable methods on the CPU."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from cospec.acceptance import python_verification
from cospec.acceptance.tensor.verify import verify_drafts
from cospec.core.model_io import TokenBatch
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, tokens_of, toy_engine
from harness.verification import Round

DEVICE = "cuda"
METHODS = ["match", "rejection", "block", "recursive", "typical"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OnDevice(ToyModel):
    """Gives its logits on the device."""

    def forward(self, batch: TokenBatch) -> Tensor:
        return super().forward(batch).to(DEVICE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_results_are_those_of_the_cpu(method: str, temperature: float) -> None:
    made = Round(300, np.random.default_rng(3))
    for seed in range(120):
        top_p = 0.9 if seed % 4 == 0 else 1.0
        params = SamplingParams(temperature=temperature, seed=seed, top_p=top_p, max_tokens=9, min_tokens=2)
        made.add(params, method, seed % 6, 0.97, seed % 2 == 0, seed % 3 == 0)
    found = verify_drafts(made.tasks, made.acceptance_methods, made.rows.to(DEVICE))
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, made.rows)


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_verifies_on_the_device(method: str) -> None:
    def outputs(model: ToyModel) -> dict[str, tuple[int, ...]]:
        drafter = ModelDrafter(ToyModel(5, order=1, seed=5, sharpness=1.5))
        params = SamplingParams(max_tokens=20, seed=3, presence_penalty=0.5, bad_words_token_ids=((1, 1),))
        return tokens_of(run_all(toy_engine(model, drafter, method), [make_request("r", (0, 1), params)]))

    wanted = outputs(ToyModel(5, seed=1))
    with patch(
        "cospec.acceptance.python_verification.verify_drafts", side_effect=AssertionError("logits left the device")
    ):
        assert outputs(OnDevice(5, seed=1)) == wanted
