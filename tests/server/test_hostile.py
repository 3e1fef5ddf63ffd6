"""A few hundred mutated and hostile requests harm neither the server nor a neighbour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from server.served import write_llama

ROOT = Path(__file__).parents[2]


def test_hostile_requests_harm_nothing(tmp_path: Path) -> None:
    model, found = write_llama(tmp_path / "model"), tmp_path / "found.json"
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    engine = {"model": str(model), "speculative_config": drafts, "dtype": "float32", "threads": 1}
    command = [sys.executable, "-m", "benchmarks.hostile", "--requests", "200", "--seed", "7", "--kills", "1"]
    command += ["--attacks-every", "20", "--engine", json.dumps(engine), "--results", "", "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.exists(), done.stderr
    figures = json.loads(found.read_text())
    assert figures["broken"] == [] and figures["neighbours"]["changed"] == []
    assert figures["neighbours"]["requests"]["200"] > 0 and figures["restarts"] == 1
    del figures["checks"]["no event-loop pause above 100 ms"]  # a test asserts no time
    assert all(figures["checks"].values()), done.stdout
