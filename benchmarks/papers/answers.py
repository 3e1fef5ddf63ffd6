"""How many questions of GSM8K and HumanEval the package's target answers, greedily.

The accuracy of the papers needs a model that answers. The tasks are those of ``cospec bench quality``, read from the
repository's prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import ROOT
from benchmarks.papers.sources import Found, Results, Source
from cospec import LLM, SamplingParams
from cospec.bench.answer_accuracy import measure as accuracy_of
from cospec.bench.answer_accuracy import read_tasks

SETS = {"GSM8K": "math", "HumanEval": "code"}


def measure(tasks: int = 100, tokens: int = 256) -> Found:
    """Return right answers of each set."""
    llm, found = LLM("zoo"), {}
    params = SamplingParams(temperature=0.0, max_tokens=tokens)

    def write(texts: Sequence[str]) -> list[str]:
        return [output.outputs[0].text for output in llm.generate(list(texts), params)]

    for name, domain in SETS.items():
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{domain}.jsonl"
            lines = (ROOT / "examples" / "data" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
            path.write_text("\n".join(json.dumps(public(json.loads(line))) for line in lines[:tasks]), encoding="utf-8")
            accuracy, _ = accuracy_of(read_tasks(path), write)
        found[name] = {"right": accuracy.right, "count": accuracy.count, "interval": accuracy.interval}
    return {"tokens": tokens, "sets": found}


def public(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the repository's prompts in the public format of its set."""
    (prompt,) = line["turns"]
    if "test" in line:
        return {"task_id": line["id"], "prompt": prompt, "entry_point": line["entry_point"], "test": line["test"]}
    question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    return {"id": line["id"], "question": question, "answer": line["reference"]}


ANSWERS = Source("answers", "python -m benchmarks.papers.dsd --run answers", make=measure)


def few(results: Results) -> str:
    """Why no accuracy of the papers has a counterpart; without figures where the answers were not counted."""
    counted = results.sentence(
        ANSWERS,
        lambda found: " and ".join(
            f"{each['right']} of {each['count']} questions of {name}" for name, each in found["sets"].items()
        ),
    )
    return f"The package's target answers {counted or 'hardly a question'}, so accuracy says nothing."
