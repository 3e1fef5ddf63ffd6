"""``cospec quantize``: writes a model as a GGUF file, or shows what a type of weights costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cospec.cli import options
from cospec.cli.options import present
from cospec.cli.output_paths import check_file, writing
from cospec.errors import InvalidInput, words


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name.")],
    output: Annotated[
        Path | None, typer.Argument(metavar="OUT.gguf", help="The file to write; without one, --text is needed.")
    ] = None,
    kind: Annotated[
        str, typer.Option("--type", help="Type of linear weights, such as q4_0, q8_0 or bf16; embeddings become q8_0.")
    ] = "q4_0",
    text: Annotated[
        Path | None, typer.Option(help="Text file; prints the perplexity on the text before and after.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to score.")] = 8192,
    threads: options.Threads = None,
) -> None:
    """Write a GGUF file, or measure perplexity.

    Every architecture that is read from GGUF files is written. Without a file any model is quantized at load, and its
    perplexity printed.
    """
    from cospec.assembly.drafters import set_threads
    from cospec.config import EngineConfig
    from cospec.models.files.gguf_writer import write_gguf
    from cospec.models.files.weight_source_selection import open_source
    from cospec.models.model_folder import resolve

    if output is None and text is None:
        raise InvalidInput("OUT.gguf", words("missing"), "a file name, or --text with a text file")
    if output is not None:
        check_file(output, "OUT.gguf", ".gguf")
    set_threads(EngineConfig.build(present(threads=threads)).threads)
    before = None if text is None else _perplexity(model, text, tokens)
    if output is not None:
        folder = resolve(model)
        source = open_source(folder)
        with writing(output, "OUT.gguf"):
            write_gguf(output, folder, source, kind)
        print(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {source.elements / 1e6:.1f} M weights")
    if before is not None and text is not None:
        after = _perplexity(model, text, tokens, kind) if output is None else _perplexity(str(output), text, tokens)
        print(f"perplexity: {before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})")


def _perplexity(model: str, text: Path, tokens: int, quantization: str | None = None) -> float:
    from cospec.models.loading import LoadOptions, load_model, load_tokenizer
    from cospec.models.model_folder import resolve
    from cospec.models.perplexity import perplexity

    ids = load_tokenizer(resolve(model)).encode(text.read_text(encoding="utf-8"), verbose=False)[:tokens]
    return perplexity(load_model(model, LoadOptions(quantization=quantization)), ids)
