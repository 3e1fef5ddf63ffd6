"""What an ensemble is for: the log-likelihood of reference answers under each blend (CoS figure 8, without judges).

Run ``python -m benchmarks.quality``. The answers are those of ``examples/data``, which no model was trained on. CoS
measures accuracy on four tasks; models of this size answer almost no task, so the likelihood of answers stands for it.
Intervals are over the texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import DOMAINS, ROOT, mean_over_texts, write
from cospec import LLM
from cospec.core.interfaces import Blend, Model
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.key_token_calibration import ReferenceRows, read_answers
from cospec.models.loading import load_model

SECOND = {"small": "zoo:drafter", "equal": "zoo:target-prose"}  # together with the zoo's target
WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
CONTRASTS = (0.0, 0.1, 0.2, 0.5)
BLENDS: dict[str, dict[float, Mapping[str, Any]]] = {
    "lambda": {weight: {"method": "weighted", "lambda": weight} for weight in WEIGHTS},
    "mu": {mu: {"method": "contrastive", "mu": mu} for mu in CONTRASTS},
}
LONGEST = 64


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=8, help="of each domain")
    parser.add_argument("--name", default="quality", help="of the file of results")
    options = parser.parse_args()
    llm = LLM("zoo", {"method": "off"})
    rows = []
    for name, second in SECOND.items():
        models = llm.engine.parts.model, load_model(second)
        for domain in DOMAINS:
            rows += [{"models": name, **row} for row in measure(llm, models, domain, options.answers)]
            print(rows[-1], flush=True)
    print("written to", write(options.name, {"per_domain": options.answers, "rows": rows}))


def measure(llm: LLM, models: Sequence[Model], domain: str, per_domain: int) -> list[dict[str, Any]]:
    """Return nats per token of the answers of a domain under every blend of two models, each with a 95% interval."""
    lines = (ROOT / "examples" / "data" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    given = [json.loads(line) for line in lines[:per_domain]]
    texts = [(llm.encode(row["turns"][0]), llm.encode(row["reference"])[:LONGEST]) for row in given]
    answers = [read_answers(models, [text]) for text in texts]
    found = []
    for option, blends in BLENDS.items():
        for value, ensemble in blends.items():
            blend = build_blend(ensemble, 2)
            losses = [nats_of(blend, answer) for answer in answers]
            nats = mean_over_texts(losses, [len(answer) for answer in answers])
            found.append({"domain": domain, "option": option, "value": value, "nats": nats})
    return found


def nats_of(blend: Blend, answer: ReferenceRows) -> float:
    """Return the nats of an answer under a blend."""
    total = 0.0
    for target, other, tokens in answer.parts():
        rows = blend.combine([(target, other)[member] for member in blend.members])
        total -= float(torch.log_softmax(rows.double(), -1).gather(-1, tokens[:, None]).sum())
    return total


if __name__ == "__main__":
    main()
