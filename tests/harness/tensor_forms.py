"""Wrong tensor forms, which tests have to detect."""

from __future__ import annotations

import torch
from torch import Tensor

from cospec.acceptance.rejection import Rejection
from cospec.acceptance.tensor.batch import TensorBatch
from cospec.acceptance.tensor.methods import rejection


def keeps_target(batch: TensorBatch) -> Tensor:
    """Replace a rejected token by a draw from the target distribution instead of the residual."""
    end = rejection(batch)[:, 0]
    rejected = end + 1 < batch.lengths
    return torch.stack([end, batch.draw(batch.probs[batch.rows_after(end)], end + 1, rejected)], -1)


class NoResidual(Rejection):
    """``rejection`` without the residual, in tensors."""

    tensor_form = "harness.tensor_forms:keeps_target"
