"""``cospec train``: makes a family of models, stage by stage. Every stage resumes after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cospec.cli.output_paths import make_folder
from cospec.errors import InvalidInput

app = typer.Typer(
    help="Train a family: tokenizer, target, drafters, heads. An interrupted stage resumes if run again with "
    "the same --out.",
    no_args_is_help=True,
)

RecipeName = Annotated[str, typer.Option("--recipe", help="A shipped recipe, or the path of a YAML file.")]
Data = Annotated[Path, typer.Option("--data", help="Folder with prose.txt.xz and math.jsonl.xz.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for checkpoints, logs and tokenised text.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, help="Train on this many tokens in total.", show_default="the recipe's"),
]
Compiled = Annotated[bool, typer.Option("--compile", help="Use torch.compile.")]
To = Annotated[Path, typer.Option("--to", help="Folder for the finished models and their card.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="Family to start from if --out has no checkpoints: zoo, or a folder."),
]

RUNS = Path("runs/zoo")
DATA = Path("data")
EXPORTED = Path("runs/export")


@app.command()
def tokenizer(recipe: RecipeName = "zoo", data: Data = DATA, out: Out = RUNS) -> None:
    """Train the tokenizer and tokenise the text."""
    from cospec.training.family import prepare

    made, corpus = prepare(_recipe(recipe, None), _folder(data), make_folder(out, "out"))
    sizes = ", ".join(f"{name} {len(stream):,} tokens" for name, stream in corpus.train.items())
    _say(f"{made.get_vocab_size():,} entries in {out / 'tokenizer'}; {sizes}.")


@app.command()
def target(
    recipe: RecipeName = "zoo",
    data: Data = DATA,
    out: Out = RUNS,
    tokens: Tokens = None,
    compiled: Compiled = False,
    start: From = None,
) -> None:
    """Train the target by next-token prediction. With --from a family's weights get a new schedule."""
    from cospec.training.family import train_target

    _adopt(start, out, "target")
    trainer = train_target(_recipe(recipe, "target", tokens), _folder(data), make_folder(out, "out"), compiled)
    _say(f"{trainer.step:,} steps in {trainer.seconds / 60:.1f} minutes; the checkpoint is in {trainer.folder}.")


@app.command()
def drafter(
    recipe: RecipeName = "zoo",
    data: Data = DATA,
    out: Out = RUNS,
    tokens: Tokens = None,
    compiled: Compiled = False,
    start: From = None,
) -> None:
    """Distil the target into the drafter. With --from a family's weights get a new schedule."""
    from cospec.training.distill import train_drafter

    _adopt(start, out, "drafter")
    trainer = train_drafter(_recipe(recipe, "drafter", tokens), _folder(data), make_folder(out, "out"), compiled)
    _say(f"{trainer.step:,} steps in {trainer.seconds / 60:.1f} minutes; the checkpoint is in {trainer.folder}.")


@app.command()
def drafters(
    recipe: RecipeName = "zoo",
    data: Data = DATA,
    out: Out = RUNS,
    start: From = None,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", help="Only this domain; repeatable.", show_default="all")
    ] = None,
) -> None:
    """Distil one specialist per domain. With --from a family's specialists get a new schedule."""
    from cospec.training.distill import train_specialists
    from cospec.training.family import ADOPTED, continue_training

    made = _recipe(recipe, None)
    _adopt(start, out)
    for name in domain or made.mixture:
        if start is not None and (out / ADOPTED / name).exists():
            continue_training(name, out)
    for name, trainer in train_specialists(made, _folder(data), make_folder(out, "out"), domain or ()).items():
        minutes = trainer.seconds / 60
        _say(f"{name}: {trainer.step:,} steps in {minutes:.1f} minutes; the checkpoint is in {trainer.folder}.")


@app.command()
def variants(
    recipe: RecipeName = "zoo",
    data: Data = DATA,
    out: Out = RUNS,
    start: From = None,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Only this variant; repeatable.", show_default="all")
    ] = None,
) -> None:
    """Train adapters of the target on the recipe's other mixtures."""
    from cospec.training.family import train_variants

    made = _recipe(recipe, None)
    _adopt(start, out)
    for member, trainer in train_variants(made, _folder(data), make_folder(out, "out"), name or ()).items():
        minutes = trainer.seconds / 60
        _say(f"{member}: {trainer.step:,} steps in {minutes:.1f} minutes; the checkpoint is in {trainer.folder}.")


@app.command()
def heads(
    recipe: RecipeName = "zoo", data: Data = DATA, out: Out = RUNS, start: From = None, to: To = EXPORTED
) -> None:
    """Train Medusa heads on the frozen target. Saves the heads to --to. Resumes after an interruption."""
    from cospec.training.medusa_heads import train_heads

    made = _recipe(recipe, None)
    _adopt(start, out)
    trained = train_heads(made, _folder(data), make_folder(out, "out"), make_folder(to, "to"))
    for number, ranks in enumerate(trained.accuracy):
        _say(f"head {number}: top-1 accuracy {ranks[0]:.1%}, top-{len(ranks)} accuracy {sum(ranks):.1%}.")
    _say(f"The heads are in {to / 'heads'}.")


@app.command()
def export(recipe: RecipeName = "zoo", out: Out = RUNS, to: To = EXPORTED) -> None:
    """Write bf16 safetensors, tokenizer files and the model card."""
    from cospec.training.export import export as write

    _say(f"The family is in {write(_recipe(recipe, None), _folder(out, 'out'), make_folder(to, 'to'))}.")


@app.command()
def evaluate(recipe: RecipeName = "zoo", out: Out = RUNS, to: To = EXPORTED) -> None:
    """Measure losses, acceptance and samples. Adds the figures to the card of ``export``."""
    from cospec.training.export import measure

    card = measure(_recipe(recipe, None), _folder(out, "out"), to)
    for name, member in card["members"].items():
        losses = ", ".join(f"{domain} {loss['nats_per_token']:.3f}" for domain, loss in member["losses"].items())
        _say(f"{name}: {losses} nats per token of held-out text.")
    for temperature, drafters in card.get("acceptance", {}).items():
        for name, domains in drafters.items():
            shares = ", ".join(f"{domain} {kept['draft_acceptance_rate']:.1%}" for domain, kept in domains.items())
            _say(f"temperature {temperature}: acceptance of {name}: {shares}.")


@app.command(name="all")
def everything(
    recipe: RecipeName = "zoo",
    data: Data = DATA,
    out: Out = RUNS,
    to: To = EXPORTED,
    compiled: Compiled = False,
    start: From = None,
) -> None:
    """Run every stage.

    The order is tokenizer, target, drafter, specialists, variants, export, heads, evaluate.

    With --from, target and drafter start from a family's weights; later stages start from the beginning.
    """
    _adopt(start, out, "target", "drafter")
    tokenizer(recipe, data, out)
    target(recipe, data, out, None, compiled)
    drafter(recipe, data, out, None, compiled)
    if _recipe(recipe, None).specialists is not None:
        drafters(recipe, data, out)
    variants(recipe, data, out)
    export(recipe, out, to)
    if _recipe(recipe, None).heads is not None:
        heads(recipe, data, out, None, to)
    evaluate(recipe, out, to)


def _say(sentence: str) -> None:
    Console().print(sentence, soft_wrap=True, markup=False)


def _adopt(family: str | None, out: Path, *trained: str) -> None:
    """Copy a family into ``out``; the members ``trained`` there start from the family's weights."""
    if family is None:
        return
    from cospec.models.model_folder import ZOO
    from cospec.training.family import adopt, continue_training

    adopt(ZOO if family == "zoo" else _folder(Path(family), "from"), make_folder(out, "out"))
    for name in trained:
        continue_training(name, out)


def _folder(path: Path, field: str = "data") -> Path:
    if not path.is_dir():
        raise InvalidInput(field, str(path), "an existing folder")
    return path


def _recipe(name: str, member: str | None, tokens: int | None = None) -> Any:
    from cospec.training.recipe import load_recipe

    recipe = load_recipe(name)
    if member is None or tokens is None:
        return recipe
    field = f"{member}_schedule"
    schedule = getattr(recipe, field).model_copy(update={"tokens": tokens})
    return recipe.model_copy(update={field: schedule})
