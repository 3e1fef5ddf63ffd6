"""The option groups that the benchmarks share, in the names of ``vllm bench``."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from cospec.cli import options
from cospec.cli.options import present
from cospec.cli.output_paths import check_file, make_folder

if TYPE_CHECKING:
    from cospec.bench.metrics import Selection
    from cospec.bench.request_record import Params, Prompt

DATA = "Prompts"
METRICS = "Metrics"
RESULTS = "Results"

NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts, in turn from every domain.", rich_help_panel=DATA)]
OutputLen = Annotated[
    int, typer.Option("--output-len", "--max-tokens", min=1, help="Tokens per answer.", rich_help_panel=DATA)
]
BatchSizes = Annotated[list[int], typer.Option(min=1, help="Prompts at once; may be repeated.")]


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """The prompts, and the seed of all random choices."""

    dataset_path: Annotated[
        list[Path],
        typer.Option(
            help="Spec-Bench, HumanEval, GSM8K, ShareGPT or plain prompts; the format is detected. May be repeated.",
            rich_help_panel=DATA,
        ),
    ]
    seed: Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=DATA)] = 0

    def take(self, n: int) -> list[Prompt]:
        """Return ``n`` prompts, in turn from every domain."""
        from cospec.bench import datasets

        return datasets.sample(datasets.load_all(self.dataset_path), n, self.seed)


@dataclass(frozen=True, slots=True)
class DecodingFlags:
    """The sampling parameters of every output."""

    output_len: OutputLen = 128
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Write exactly --output-len tokens.", rich_help_panel=DATA),
    ] = True
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=DATA)] = 0.0

    def params(self, seed: int) -> Params:
        """Build the parameters that every system gets."""
        from cospec.bench.request_record import Params

        return Params(max_tokens=self.output_len, temperature=self.temperature, seed=seed, ignore_eos=self.ignore_eos)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Where and how the cospec engine computes."""

    dtype: options.Dtype = None
    quantization: options.Quantization = None
    kv_cache_dtype: options.KvCacheDtype = None
    device: options.Device = None
    threads: options.Threads = None
    instruction_set: options.InstructionSet = None
    native: options.Native = None
    max_model_len: options.MaxModelLen = None

    def given(self, *models: str) -> dict[str, Any]:
        """Return the given options under the field names of the engine's configuration; several models are an
        ensemble."""
        return options.chosen_models(list(models)) | present(
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            threads=self.threads,
            instruction_set=self.instruction_set,
            native=self.native,
            max_model_len=self.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class MetricFlags:
    """The reported metrics, and the tokenizer that counts tokens."""

    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer that counts tokens: folder, zoo or hub name; none takes the counts of each system.",
            rich_help_panel=METRICS,
            show_default="the model's",
        ),
    ] = None
    percentile_metrics: Annotated[
        str, typer.Option(help="Which of ttft, tpot, itl and e2el to report.", rich_help_panel=METRICS)
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of each metric.", rich_help_panel=METRICS)] = (
        "50,99"
    )
    cost_per_hour: Annotated[
        float,
        typer.Option(
            min=0,
            help="Price of the machines, for a price of tokens.",
            rich_help_panel=METRICS,
            show_default="for serve, what a cospec server declares",
        ),
    ] = 0.0

    def selection(self, goodput: list[str] | None = None) -> Selection:
        """Parse the options.

        Raises:
            InvalidInput: an unknown metric, percentile or bound.
        """
        from cospec.bench import metrics as measured

        return measured.Selection(
            measured.parse_metrics(self.percentile_metrics),
            measured.parse_percentiles(self.metric_percentiles),
            measured.parse_goodput(goodput or []),
            self.cost_per_hour,
        )


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """Where the result is saved. A file name implies ``--save-result``."""

    save_result: Annotated[
        bool, typer.Option("--save-result", help="Save the result as JSON and as HTML.", rich_help_panel=RESULTS)
    ] = False
    result_dir: Annotated[Path, typer.Option(help="Folder for results.", rich_help_panel=RESULTS)] = Path("results")
    result_filename: Annotated[
        str | None,
        typer.Option(
            help="Name of the JSON and the HTML file.", rich_help_panel=RESULTS, show_default="bench-DATE-TIME"
        ),
    ] = None

    def place(self) -> Path | None:
        """Return the path of the JSON file; None if no result is saved. Called before the measurement.

        Raises:
            InvalidInput: the path is not writable.
        """
        if not self.save_result and self.result_filename is None:
            return None
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        name = self.result_filename or f"bench-{stamp}"
        to = self.result_dir / (name if name.endswith(".json") else f"{name}.json")
        make_folder(to.parent, "result_dir")
        check_file(to, "result_filename")
        return to


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer: one parameter per field instead of each dataclass parameter."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            own = get_type_hints(kind, include_extras=True)
            flat += [_keyword(field.name, _default(field), own[field.name]) for field in fields(kind)]
        else:
            flat.append(_keyword(parameter.name, parameter.default, kind))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    called.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
