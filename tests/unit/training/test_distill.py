from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cospec.training.corpus import Corpus, end_token
from cospec.training.distill import DistillationLoss, divergence, low_rank_embedding, train_drafter
from cospec.training.distill_data import draw_batches
from cospec.training.evaluate import agreements, heldout_loss
from cospec.training.export import save_model
from cospec.training.family import load_trained, new_model, train_target
from cospec.training.generate import PromptSampler, WritingPlan, engine_writer, write_stream
from cospec.training.recipe import Distillation, TrainingRecipe
from cospec.training.teacher_cache import fingerprint, read


def test_divergence_is_the_sum_over_tokens() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    assert divergence(student, teacher) == pytest.approx(float(expected), rel=1e-5)
    assert divergence(teacher, teacher) == pytest.approx(0.0, abs=1e-6)


def test_the_low_rank_embedding_is_the_best_one() -> None:
    torch.manual_seed(0)
    head, states = torch.randn(20, 8), torch.randn(400, 8) * torch.linspace(3, 0.1, 8)

    def lost(embedding: torch.Tensor) -> float:
        logits = states @ head.T
        fitted = torch.linalg.lstsq(embedding, logits.T).solution
        return float((logits.T - embedding @ fitted).square().sum())

    best = lost(low_rank_embedding(head, states, 3))
    directions = torch.linalg.svd(states @ head.T, full_matrices=False).Vh[:3].T
    assert best == pytest.approx(lost(directions), rel=1e-3)
    assert best < lost(torch.linalg.svd(head, full_matrices=False).U[:, :3]) * 0.9
    assert lost(low_rank_embedding(head, states, 8)) < best * 1e-6


def test_every_lesson_is_seen_once_per_epoch() -> None:
    def pool(step: int) -> np.ndarray:
        return draw_batches(step, rows=4, share=0.5, pools=(6, 4), seed=1)

    drawn = np.stack([pool(step) for step in range(6)])
    corpus, written = drawn[drawn < 6], drawn[drawn >= 6]
    assert sorted(corpus[:6]) == sorted(corpus[6:12]) == list(range(6))
    assert sorted(written[:4]) == sorted(written[4:8]) == sorted(written[8:12]) == list(range(6, 10))
    assert np.array_equal(drawn[3], pool(3))
    assert set(draw_batches(0, rows=4, share=0.5, pools=(6, 0), seed=1)) <= set(range(6))


def test_the_drafter_comes_nearer_to_its_target(recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer) -> None:
    longer = recipe.target_schedule.model_copy(update={"tokens": 8_000})
    recipe = recipe.model_copy(update={"target_schedule": longer, "drafter_schedule": longer})
    train_target(recipe, runs, runs)
    target = load_trained(recipe, "target", tokenizer, runs)
    weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = train_drafter(recipe, runs, runs)
    assert all(
        torch.equal(load_trained(recipe, "target", tokenizer, runs).state_dict()[n], w) for n, w in weights.items()
    )
    loss = trainer.loss
    assert isinstance(loss, DistillationLoss)
    numbers = torch.arange(len(loss.teacher_cache.tokens))
    fresh = new_model(recipe.drafter, recipe, tokenizer, 0)
    assert loss(trainer.model, numbers) < 0.6 * loss(fresh, numbers)


def test_an_interrupted_distillation_ends_as_an_unbroken_one(recipe: TrainingRecipe, runs: Path) -> None:
    train_target(recipe, runs, runs)
    whole = train_drafter(recipe, runs, runs)
    for path in (runs / "drafter").iterdir():
        path.unlink()
    half = recipe.drafter_schedule.model_copy(update={"warmup": 0.0, "decay": 0.0})
    parts = [
        recipe.model_copy(update={"drafter_schedule": half.model_copy(update={"tokens": n})}) for n in (2_000, 4_000)
    ]
    for part in parts:
        broken = train_drafter(part, runs, runs)
    for path in (runs / "drafter").iterdir():
        path.unlink()
    unbroken = train_drafter(parts[1], runs, runs)
    assert whole.step == broken.step == unbroken.step
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, broken.model.state_dict()[name]), name


def test_the_target_reads_on_where_it_stopped(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    target = new_model(recipe.target, recipe, tokenizer, 1).eval()
    windows = corpus.windows(recipe.mixture, 6, 16, (0,))
    whole = read(target, windows, tmp_path / "whole", rows=2)
    read(target, windows, tmp_path / "part", rows=2)
    (tmp_path / "part" / "read.txt").write_text("4")
    states = np.lib.format.open_memmap(tmp_path / "part" / "states.npy", mode="r+")
    states[4:] = 0
    states.flush()
    assert np.array_equal(read(target, windows, tmp_path / "part", rows=2).states, whole.states)
    # Other windows in the same folder are read anew.
    other = corpus.windows(recipe.mixture, 6, 16, (1,))
    assert not np.array_equal(read(target, other, tmp_path / "part", rows=2).states, whole.states)


def test_new_windows_start_at_0_after_an_interruption(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between laying out the new states and reading the first of them: the old count must not be believed."""
    target = new_model(recipe.target, recipe, tokenizer, 0)
    old, new = (corpus.windows(recipe.mixture, 4, 16, (seed,)) for seed in (0, 1))
    read(target, old, tmp_path / "part", rows=2)

    def killed(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target.model, "forward", killed)
        read(target, new, tmp_path / "part", rows=2)
    resumed = read(target, new, tmp_path / "part", rows=2).states
    assert np.array_equal(resumed, read(target, new, tmp_path / "whole", rows=2).states)


def test_lessons_give_the_logits_of_the_target(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    target = new_model(recipe.target, recipe, tokenizer, 1).eval()
    teacher_cache = read(target, corpus.windows(recipe.mixture, 3, 16, (0,)), tmp_path)
    loss = DistillationLoss(teacher_cache, target.lm_head.weight.detach(), Distillation())
    # The target is its own perfect student, up to the 16 bits that its states are kept in.
    assert float(loss(target, torch.arange(3)).detach()) < 1e-4
    other = new_model(recipe.target, recipe, tokenizer, 2).eval()
    assert float(loss(other, torch.arange(3)).detach()) > 1e-3


def test_writing_goes_on_where_it_stopped(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    prompts = PromptSampler.build(corpus.train, recipe.mixture, tokenizer)
    calls: list[tuple[float, int]] = []

    def writer(asked: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
        calls.append((temperature, seed))
        return [[seed % 200] * length for _ in asked]

    plan = WritingPlan(tokens=900, temperatures=(0.0, 1.0), seed=5, rows=2, length=20)
    whole = write_stream(writer, prompts, tmp_path, plan)
    count = len(calls)
    assert count > 2 and [temperature for temperature, _ in calls[:2]] == [0.0, 1.0]
    (tmp_path / f"{count - 1:05d}.npy").unlink()
    assert np.array_equal(write_stream(writer, prompts, tmp_path, plan), whole)
    assert len(calls) == count + 1 and calls[-1] == calls[count - 1]


def test_prompts_have_one_length_and_begin_where_text_begins(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus
) -> None:
    prompts = PromptSampler.build(corpus.train, {"math": 1.0}, tokenizer)
    drawn = prompts.draw(30, (1, 2))
    assert drawn == prompts.draw(30, (1, 2))
    assert len({len(prompt) for prompt in drawn}) == 1 and len(drawn[0]) >= 32
    texts = [tokenizer.decode(prompt) for prompt in drawn]
    assert all(text.startswith(("Question:", "Answer:")) for text in texts)
    assert len({text[0] for text in texts}) == 2


def test_the_engine_s_writer_ends_at_the_end_token(
    recipe: TrainingRecipe, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = new_model(recipe.target, recipe, tokenizer, 1).eval()
    end, prompts = end_token(tokenizer), [[1, 2, 3], [4, 5, 6]]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_model(copy.deepcopy(model), tmp_path / "model", tmp_path, end)
    write = engine_writer(tmp_path / "model")
    sampled = write(prompts, 12, 1.0, 7)
    assert sampled == write(prompts, 12, 1.0, 7) != write(prompts, 12, 1.0, 8)
    assert all(len(answer) <= 12 and end not in answer[:-1] for answer in sampled)
    greedy = write(prompts, 4, 0.0, 7)[0]
    assert greedy[0] == int(model.bfloat16().float()(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())


def test_the_fingerprint_knows_every_weight(recipe: TrainingRecipe, tokenizer: Tokenizer) -> None:
    model = new_model(recipe.target, recipe, tokenizer, 1)
    before = fingerprint(model)
    assert fingerprint(new_model(recipe.target, recipe, tokenizer, 1)) == before
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert fingerprint(model) != before


@torch.no_grad()
def test_agreement_is_counted_where_the_target_wrote(recipe: TrainingRecipe, tokenizer: Tokenizer) -> None:
    target, other = (new_model(recipe.target, recipe, tokenizer, seed).eval() for seed in (1, 2))
    documents = [([5, 6, 7], [8, 9]), ([1, 2], []), ([3], [4, 5, 6])]
    found = agreements({"same": target, "other": other}, target, documents)
    assert (found["same"].top1, found["same"].tokens) == (1.0, 5)
    assert found["same"].overlap == pytest.approx(1.0, abs=1e-5)
    p, q = (
        torch.cat([model(torch.tensor([a])).logits[0, b:].softmax(-1) for a, b in (([5, 6, 7, 8], 2), ([3, 4, 5], 0))])
        for model in (target, other)
    )
    assert found["other"].overlap == pytest.approx(1 - float((p - q).abs().sum(-1).mean()) / 2, abs=1e-5)


def test_heldout_loss_of_an_untrained_model_is_that_of_guessing(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus
) -> None:
    model = new_model(recipe.target, recipe, tokenizer, 1).eval()
    loss = heldout_loss(model, tokenizer, corpus.heldout["math"], 32)
    assert loss.nats_per_token == pytest.approx(np.log(recipe.vocab_size), abs=0.3)
    stream = corpus.heldout["math"][: loss.tokens + 1]
    characters = len(tokenizer.decode(stream[1:].tolist()))
    assert loss.bits_per_character == pytest.approx(
        loss.nats_per_token * loss.tokens / np.log(2) / characters, rel=0.05
    )
