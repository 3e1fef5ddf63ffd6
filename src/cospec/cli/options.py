"""Options that commands share, as types, and their conversion into an engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cospec.sampling_params import SamplingParams

ENGINE = "Engine"
SAMPLING = "Sampling"

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name; repeat for an ensemble, which --ensemble defines.",
        show_default="zoo",
    ),
]
Model = Annotated[str, typer.Option(metavar="MODEL", help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name.")]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name; or --model.", show_default="zoo"
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="""How to draft and verify, such as '{"method": "ngram", "num_speculative_tokens": 4}'. Keys: method,
        num_speculative_tokens, max_nodes, widths, acceptance_method, policy, policy_options, execution_mode,
        drafter_executor (inline, thread, process or node), drafter_cores, drafter_nodes, request_may_choose, and the
        keys of the method, such as model. Each drafter of a pool has its own executor and cores.""",
        rich_help_panel=ENGINE,
        show_default="the family's drafter, otherwise suffix, under the policy goodput",
    ),
]
OutputDistribution = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="""How several models form one distribution, such as '{"method": "weighted", "weights": [0.6, 0.4]}'.""",
        rich_help_panel=ENGINE,
    ),
]
Collaboration = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="""Which models of an ensemble propose, such as '{"proposal": "alternate", "gamma": [4, 1]}'.""",
        rich_help_panel=ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Tokens of one sequence.", rich_help_panel=ENGINE, show_default="the model's own limit"),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences that run together.", rich_help_panel=ENGINE)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens computed per step.", rich_help_panel=ENGINE)]
KvCacheMemoryBytes = Annotated[
    int | None,
    typer.Option(
        help="Bytes of the KV caches of all models together.",
        rich_help_panel=ENGINE,
        show_default="on a GPU the rest of its share, on a CPU a quarter of the free memory, at most 1 GiB",
    ),
]
WeightCacheBytes = Annotated[
    int | None,
    typer.Option(
        help="Bytes of packed weights kept on disk for later starts; 0 keeps none.",
        rich_help_panel=ENGINE,
        show_default="COSPEC_WEIGHT_CACHE_BYTES, or 32 GiB",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(help="Share of a GPU's memory for cospec.", rich_help_panel=ENGINE)
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=ENGINE)]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE)]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Format of linear weights: int8 (a scale per output), int4 (q4_0), or blocks of GGUF: q8_0, q6_k, q5_1, "
        "q5_k, q5_0, q4_1, q4_k, q4_0, iq4_nl, mxfp4.",
        rich_help_panel=ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str | None,
    typer.Option(help="Of keys and values: auto, float32, bfloat16, float16 or int8.", rich_help_panel=ENGINE),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="A Python module to import first, such as one that registers a blend; may be repeated.",
        rich_help_panel=ENGINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of the CPU kernels.", rich_help_panel=ENGINE, show_default="one per processor"),
]
InstructionSet = Annotated[
    str | None,
    typer.Option(help="For the CPU kernels: auto, base, or a set that `cospec doctor` lists.", rich_help_panel=ENGINE),
]
Native = Annotated[
    str | None,
    typer.Option(
        help="auto uses the native library; off runs steps, acceptance methods, drafting and pools in Python.",
        rich_help_panel=ENGINE,
    ),
]
PipelineParallelSize = Annotated[
    int | None, typer.Option(help="Processes that share the target's layers.", rich_help_panel=ENGINE)
]
TensorParallelSize = Annotated[
    int | None, typer.Option(help="Processes that share each layer's heads and columns.", rich_help_panel=ENGINE)
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV cache of shared prompt prefixes.",
        rich_help_panel=ENGINE,
    ),
]

Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float | None, typer.Option(help="Keep the likeliest tokens up to this probability.", rich_help_panel=SAMPLING)
]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Seed of a repeatable output.", rich_help_panel=SAMPLING)]
SamplingJson = Annotated[
    str | None,
    typer.Option(
        "--sampling-params",
        metavar="JSON",
        help="""Any sampling parameters by name, such as '{"min_p": 0.05, "stop": ["."]}'; single options win.""",
        rich_help_panel=SAMPLING,
    ),
]


def chosen_models(names: list[str], argument: str | None = None) -> dict[str, Any]:
    """Return the configuration of one model, or of an ensemble.

    Args:
        names: the values of ``--model``.
        argument: the model that the command has as an argument.

    Raises:
        InvalidInput: there are an argument and options.
    """
    from cospec.errors import InvalidInput, words

    if argument is not None and names:
        given = words(f"{argument} as an argument and {', '.join(names)} with --model")
        raise InvalidInput("model", given, "one argument, or --model for each model of an ensemble")
    names = names if argument is None else [argument]
    if len(names) > 1:
        return {"models": names}
    return {"model": names[0]} if names else {}


def sampling_params(text: str | None, longest: int, **given: Any) -> SamplingParams:
    """Return the sampling parameters of a command: the JSON object, overridden by single options.

    Args:
        longest: tokens of an output if no option sets the length.

    Raises:
        InvalidInput: a parameter is unknown or out of range, or asks for more than one output.
    """
    from cospec.config import read_json
    from cospec.errors import InvalidInput
    from cospec.sampling_params import SamplingParams

    named = {} if text is None else read_json(text, "sampling_params")
    params = SamplingParams.parse({"max_tokens": longest, **named, **present(**given)})
    if params.n != 1:
        raise InvalidInput("n", params.n, "1, because this command writes one answer per prompt")
    return params


def present(**values: Any) -> dict[str, Any]:
    """Return the given options. The configuration keeps its defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}
