"""Checks an installed wheel: the kernels load, and seeded text is the same with drafts and without."""

from __future__ import annotations

from cospec import LLM, SamplingParams
from cospec.native import library

PROMPTS = ["It was a dark night, and", "Question: Tom has 3 apples and buys 4 more. How many apples does he have?"]


def main() -> None:
    """Write with drafts and without."""
    assert library.available(), library.why_not()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24)
    texts = []
    for speculative in ({"method": "off"}, {"method": "draft_model", "num_speculative_tokens": 4}):
        with LLM(model="zoo", speculative_config=speculative) as llm:
            texts.append([found.outputs[0].text for found in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1], texts
    print(f"kernels {library.isa()}, {library.threads()} threads: {texts[0]}")


if __name__ == "__main__":
    main()
