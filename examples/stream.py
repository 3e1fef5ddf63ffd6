"""Print a completion as it is written; what was drafted and accepted is underlined.

python examples/stream.py "Once upon a time"
"""

from __future__ import annotations

import sys

from cospec import LLM, SamplingParams

UNDERLINED, PLAIN = "\033[4m", "\033[0m"


def main() -> None:
    """One event is what one round committed: the accepted draft tokens, then one token of the target's own."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
    llm = LLM(model="zoo")
    print(prompt, end="")
    for event in llm.stream(prompt, SamplingParams(temperature=0.7, seed=1, max_tokens=96)):
        drafted = any(source not in ("target", "bonus") for source in event.sources)
        print(f"{UNDERLINED}{event.text}{PLAIN}" if drafted else event.text, end="", flush=True)
        if event.stats is not None:
            print(f"\n--- {event.stats.mean_acceptance_length:.2f} tokens per verified draft")


if __name__ == "__main__":
    main()
