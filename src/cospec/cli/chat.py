"""``cospec chat``: a conversation in the terminal that shows which tokens were drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present

if TYPE_CHECKING:
    from rich.console import Console

    from cospec.core.stats import RequestStats
    from cospec.core.types import Event
    from cospec.sampling_params import SamplingParams
    from cospec.text.tokenizer import TextTokenizer

LONGEST = 512  # tokens of an answer by default
COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
# A model may generate control characters, which would move the cursor or rename the window.
UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
HELP = """/help   this page
/stats  how the answers were speculated for
/reset  forget the conversation
/quit   leave (so does Ctrl-D); Ctrl-C ends an answer
Tokens that a drafter wrote and the target accepted are coloured, one colour per drafter; the target's own are plain."""


def chat(
    model: options.ModelArgument = None,
    models: options.Models = None,
    ensemble: options.OutputDistribution = None,
    collaboration: options.Collaboration = None,
    speculative_config: options.SpeculativeConfig = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer, in tokens.", rich_help_panel=options.SAMPLING, show_default=str(LONGEST)),
    ] = None,
    sampling_params: options.SamplingJson = None,
    max_model_len: options.MaxModelLen = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    native: options.Native = None,
    plugins: options.Plugins = None,
) -> None:
    """Talk with a model in the terminal. Accepted draft tokens are coloured."""
    from rich.console import Console

    from cospec.config import read_json

    chosen = options.chosen_models(models or [], model) | present(ensemble=ensemble, collaboration=collaboration)
    given = present(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    params = options.sampling_params(sampling_params, LONGEST, **given)
    config = read_json(speculative_config, "speculative_config") if speculative_config else None

    from cospec.llm import LLM

    rest = present(
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        instruction_set=instruction_set,
        native=native,
        plugins=plugins or None,
    )
    with LLM(speculative_config=config, **chosen, **rest) as llm:
        Conversation(llm, params, Console(highlight=False)).run()


class Conversation:
    """One conversation: its messages, statistics and colours."""

    def __init__(self, llm: Any, params: SamplingParams, console: Console) -> None:
        from cospec.text.tokenizer import TextTokenizer

        self._llm = llm
        self._params = params
        self._console = console
        engine = llm.engine
        self._tokens = TextTokenizer(engine.tokenizer, engine.max_model_len, engine.vocab_size)
        self._messages: list[dict[str, str]] = []
        self._stats: list[RequestStats] = []
        self._colours: dict[str, str] = {}

    def run(self) -> None:
        """Read questions and answer until the user quits."""
        self._console.print(f"{self._llm.engine.model_name}: /help shows the commands.", style="dim")
        while True:
            try:
                line = self._console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/help":
            self._console.print(HELP, markup=False)
        elif line == "/stats":
            self._show_stats()
        elif line == "/reset":
            self._messages.clear()
            self._console.print("The conversation starts again.", style="dim")
        else:
            self._console.print(f"{line} is unknown; allowed are /help, /stats, /reset and /quit.", markup=False)

    def _answer(self, line: str) -> None:
        from cospec.errors import CospecError

        messages = [*self._messages, {"role": "user", "content": line}]
        written: list[str] = []
        try:
            ids = self._tokens.check(self._tokens.chat(messages), "messages")
            for text, colour in self._coloured(self._llm.stream(list(ids), self._params)):
                written.append(text)
                self._console.print(text.translate(UNPRINTABLE), style=colour, end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        except CospecError as error:
            self._console.print(f"{error} /reset starts the conversation again.", markup=False, end="")
            written.clear()
        self._console.print()
        if written:  # an unanswered question is no part of the conversation
            self._messages = [*messages, {"role": "assistant", "content": "".join(written)}]

    def _coloured(self, events: Iterator[Event]) -> Iterator[tuple[str, str]]:
        """Yield pieces of text, each with the colour of its first token.

        Raises:
            CospecError: the answer failed.
        """
        from cospec.errors import CospecError

        pieces = SourceSpans(self._tokens)
        for event in events:
            if event.stats is not None:
                self._stats.append(event.stats)
            if event.error is not None:
                raise CospecError(event.error)
            for text, source in pieces.split(event):
                yield text, self._colour(source)

    def _colour(self, source: str) -> str:
        if source in ("target", "bonus"):
            return "default"
        return self._colours.setdefault(source, COLOURS[len(self._colours) % len(COLOURS)])

    def _show_stats(self) -> None:
        from rich.table import Table

        from cospec.outputs import total

        if not self._stats:
            self._console.print("There is no answer yet.", style="dim")
            return
        table = Table("", "last answer", "all answers", box=None)
        names, together = ("target_calls", "drafts", "drafted", "accepted"), total(self._stats)
        for name in names:
            values = (getattr(stats, name) for stats in (self._stats[-1], together))
            table.add_row(name.replace("_", " "), *map(str, values))
        means = (stats.mean_acceptance_length for stats in (self._stats[-1], together))
        table.add_row("mean acceptance length", *(f"{mean:.2f}" for mean in means))
        for name in ("ttft", "e2e"):
            value = getattr(self._stats[-1], name)
            table.add_row(f"{name} (seconds)", "-" if value is None else f"{value:.3f}", "")
        self._console.print(table)


class SourceSpans:
    """Assigns each character of a stream the source of its token.

    Text arrives later than its tokens if a character is incomplete or a stop string may have begun. Therefore sources
    are kept per byte until their text arrives.
    """

    def __init__(self, tokens: TextTokenizer) -> None:
        self._tokens = tokens
        self._sources: list[str] = []  # one source per byte of generated text that is not shown yet

    def split(self, event: Event) -> list[tuple[str, str]]:
        """Split an event's text into pieces of one source each."""
        for token, source in zip(event.tokens, event.sources, strict=True):
            if not self._tokens.is_special(token):
                self._sources.extend([source] * len(self._tokens.token_text(token).data))
        pieces: list[tuple[str, str]] = []
        for char in event.text:
            size = len(char.encode())
            source = self._sources[0] if self._sources else "target"
            del self._sources[:size]
            if pieces and pieces[-1][1] == source:
                pieces[-1] = (pieces[-1][0] + char, source)
            else:
                pieces.append((char, source))
        return pieces
