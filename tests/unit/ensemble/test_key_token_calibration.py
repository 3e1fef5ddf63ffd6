"""The fit of key tokens: figures against their definitions, and the bound of the loss."""

from __future__ import annotations

import pytest
import torch

from cospec.ensemble.blends.adaptive import AdaptiveOptions
from cospec.ensemble.key_token_calibration import ReferenceRows, calibrate, qualities, read_answers
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel


def reference_rows(count: int = 300, vocab: int = 20) -> ReferenceRows:
    """A drafter that is near its target, and answers drawn from the target."""
    generator = torch.Generator().manual_seed(3)
    target = 2 * torch.randn(count, vocab, generator=generator)
    drafter = target + 0.8 * torch.randn(count, vocab, generator=generator)
    tokens = torch.multinomial(torch.softmax(target, -1), 1, generator=generator)[:, 0]
    return ReferenceRows(target, drafter, tokens)


def test_the_figures() -> None:
    rows = reference_rows()
    p, q = (torch.softmax(logits.double(), -1) for logits in (rows.target, rows.drafter))
    free = AdaptiveOptions(max_divergence=1.0, lambda1=1e9, lambda2=1.0, lambda3=0.0)
    exact, drafter = qualities(rows, [AdaptiveOptions(max_divergence=0.0), free])
    assert exact.acceptance == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()))
    assert (exact.divergence, exact.loss) == (0.0, 0.0)
    assert drafter.acceptance == pytest.approx(1.0)
    assert drafter.divergence == pytest.approx(float((p - q).abs().sum(-1).mean()) / 2)
    own, other = (x.log().gather(-1, rows.tokens[:, None]).mean() for x in (p, q))
    assert drafter.loss == pytest.approx(float(own - other))


def test_the_loss_is_bounded_and_the_tolerance_is_used() -> None:
    rows = reference_rows()
    fits = [calibrate(rows, 0.2, tolerance) for tolerance in (0.0, 0.01, 0.1)]
    for fit, tolerance in zip(fits, (0.0, 0.01, 0.1), strict=True):
        assert fit.loss <= tolerance
        assert [fit] == qualities(rows, [fit.options])
    acceptances = [fit.acceptance for fit in fits]
    assert acceptances == sorted(acceptances) and acceptances[0] < acceptances[-1]
    (free,) = qualities(rows, [AdaptiveOptions(max_divergence=0.2, lambda1=1e9, lambda2=1.0, lambda3=0.0)])
    assert free.loss > 0.01, "otherwise the tolerance would not matter"


def test_a_larger_bound_relaxes_no_less() -> None:
    """Also where no condition at the larger bound is within the tolerance, as at 0.8 here."""
    rows, asked = reference_rows(), (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
    fits = [calibrate(rows, bound, 0.01) for bound in asked]
    for fit, bound in zip(fits, asked, strict=True):
        assert fit.loss <= 0.01 and fit.options.max_divergence <= bound
    acceptances = [fit.acceptance for fit in fits]
    assert acceptances == sorted(acceptances) and acceptances[0] < acceptances[3]
    options = fits[-1].options
    assert options.max_divergence < 0.8
    (alone,) = qualities(rows, [options.model_copy(update={"max_divergence": 0.8})])
    assert alone.loss > 0.01, "the conditions of the fit do not hold at the bound that was asked for"


def test_answers_are_scored_where_they_are() -> None:
    models = [ToyModel(4, seed=1), ToyModel(4, seed=2)]
    rows = read_answers(models, [((0, 1), (2, 3)), ((3,), (1,)), ((1,), ())])
    assert rows.tokens.tolist() == [2, 3, 1]
    for model, logits in zip(models, (rows.target, rows.drafter), strict=True):
        wanted = [model.logits(context) for context in ([0, 1], [0, 1, 2], [3])]
        torch.testing.assert_close(logits, torch.stack(wanted))
    with pytest.raises(InvalidInput, match="without a token"):
        read_answers(models, [((1,), ())])
