"""Renders ``card.json``, the model card, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

ENOUGH = 20  # tokens per parameter

_HEAD = """# The model family `{name}`

Small Llama-architecture models that come with cospec: one target, one drafter distilled from it, one byte-level BPE
tokenizer of {vocab:,} tokens. They are made for measuring and testing speculative decoding, not for facts or advice:
they write English prose, grade-school arithmetic and Python that looks right and often is not.
"""

_SPECIALISTS = """The specialists are drafters for one domain each: the generic drafter, distilled further on that
domain's text and on the target's outputs for that domain's prompts.
"""

_VARIANTS = """The variants are other targets of the same size, for decoding with several models: the target, trained
further on another mixture of the domains. They are stored as low-rank adapters in PEFT's folder format; the table
counts those parameters, and the tokens seen on top of the target's.
"""

_DATA = """## Data

| domain | text | licence |
| --- | --- | --- |
| prose | eleven English novels from Project Gutenberg | public domain in the USA |
| math | the training questions and answers of GSM8K | MIT |
| code | the sources of the Python standard library, without its tests | PSF |

Every fiftieth document of each domain was held out; all losses below are of held-out text.
"""


def render(card: Mapping[str, Any]) -> str:
    """Return the Markdown of a card of ``export`` and ``measure``; parts without measurements are omitted."""
    recipe = card["recipe"]
    parts = [_HEAD.format(name=recipe["name"], vocab=recipe["vocab_size"]), _members(card["members"])]
    parts += [text for key, text in (("specialists", _SPECIALISTS), ("variants", _VARIANTS)) if recipe.get(key)]
    parts += [_maturity(card["members"]), *(f"{note}\n" for note in card.get("notes", ())), _DATA]
    if any("losses" in member for member in card["members"].values()):
        parts.append(_losses(card["members"]))
    if card.get("acceptance"):
        parts.append(_acceptance(card["acceptance"]))
    if card.get("agreement"):
        parts.append(_agreement(card["agreement"]))
    if card.get("heads"):
        parts.append(_heads(card["heads"]))
    temperature = card.get("sampled_at", 0.7)  # older cards lack the key
    for domain, text in card.get("samples", {}).items():
        parts.append(f"## Sample: {domain} (temperature {temperature:g})\n\n```text\n{text}\n```\n")
    parts.append("## Recipe\n\n```yaml\n" + yaml.safe_dump(dict(recipe), sort_keys=False) + "```\n")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _members(members: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{member['parameters']:,}", f"{member['tokens']:,}", f"{member['steps']:,}", f"{member['hours']:.2f}"]
        for name, member in members.items()
    ]
    table = _table(["model", "parameters", "tokens seen in training", "steps", "hours"], rows)
    return "".join([table, *(_continuation(name, member) for name, member in members.items() if "before" in member)])


def _continuation(name: str, member: Mapping[str, Any]) -> str:
    """Return a note on a member that continued from exported weights; its last schedule covers a part of its tokens."""
    seen, before = member["tokens"], member["before"]["tokens"]
    return (
        f"\n`{name}` continued from weights that had seen {before:,} tokens, with new optimizers; the recipe's\n"
        f"schedule covers the {seen - before:,} tokens since.\n"
    )


def _maturity(members: Mapping[str, Any]) -> str:
    """Return a paragraph on the length of the target's training."""
    target = members["target"]
    ratio = target["tokens"] / target["parameters"]
    if ratio >= ENOUGH:
        return f"The target saw {ratio:.0f} tokens per parameter.\n"
    return (
        f"The target saw {ratio:.2g} tokens per parameter, while about {ENOUGH} are compute-optimal (Hoffmann\n"
        "et al. 2022): the target reproduces the form of its three kinds of text better than the words. Some\n"
        "words do not exist. More training would help most.\n"
    )


def _losses(members: Mapping[str, Any]) -> str:
    rows = [
        [name, domain, f"{loss['nats_per_token']:.3f}", f"{loss['bits_per_character']:.3f}", f"{loss['tokens']:,.0f}"]
        for name, member in members.items()
        for domain, loss in member.get("losses", {}).items()
    ]
    return "## Loss\n\n" + _table(["model", "domain", "nats per token", "bits per character", "tokens"], rows)


def _acceptance(acceptance: Mapping[str, Any]) -> str:
    """Return every drafter's acceptance on every domain, as in table 2 of CoSine."""
    words = (
        "## Acceptance\n\nEvery drafter against the target, by the engine, on held-out prompts: the mean tokens per "
        "draft of four, the\ntarget's token included, and in brackets the share of accepted draft tokens. "
        "Temperature 0 is greedy; at\ntemperature 1 drafts are verified by rejection sampling.\n\n"
    )
    cell = "{acceptance_length:.2f} ({draft_acceptance_rate:.1%})"
    return words + _grid(acceptance, "drafter", cell)


def _heads(heads: Mapping[str, Any]) -> str:
    """Return the accuracy of each head's first predictions."""
    words = (
        f"## Heads\n\nMedusa heads on the frozen target, {heads['parameters']:,} parameters, {heads['steps']} steps: "
        "the share of positions at which the token\nthat follows n places after the next token is among head n's first "
        "predictions, on held-out text of the target.\n\n"
    )
    rows = [
        [number, *(f"{share:.1%}" for share in itertools.accumulate(ranks))]
        for number, ranks in enumerate(heads["accuracy"], start=1)
    ]
    return words + _table(["head", *(f"first {n}" for n in range(1, len(rows[0])))], rows)


def _agreement(agreement: Mapping[str, Any]) -> str:
    words = (
        "## Agreement\n\nEvery other model against the target, on text of the target after held-out prompts "
        "at the given\ntemperature: the overlap of the two distributions, which is one minus their total variation, "
        "and in brackets the\nshare of positions with the same likeliest token.\n\n"
    )
    return words + _grid(agreement, "model", "{overlap:.1%} ({top1:.1%})")


def _grid(figures: Mapping[str, Any], head: str, cell: str) -> str:
    """Return a table by temperature, model and domain: a row per model, a column per domain."""
    domains = list(dict.fromkeys(d for models in figures.values() for by_domain in models.values() for d in by_domain))
    rows = [
        [temperature, name, *(cell.format(**by_domain[domain]) for domain in domains)]
        for temperature, models in figures.items()
        for name, by_domain in models.items()
    ]
    return _table(["temperature", head, *domains], rows)
