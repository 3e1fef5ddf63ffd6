"""Complete a few prompts and see what speculation saved.

python examples/quickstart.py
"""

from __future__ import annotations

from cospec import LLM, SamplingParams

PROMPTS = [
    "It was a cold morning when the old man came to the door and",
    "Question: Tom has 3 boxes with 12 pencils in each. He gives away 6 pencils. How many are left?\nAnswer:",
    "def read_lines(path):\n",
]


def main() -> None:
    """Greedy, with the drafter that belongs to the model."""
    with LLM(model="zoo", speculative_config={"method": "draft_model", "num_speculative_tokens": 4}) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64))
    for result in results:
        output, stats = result.outputs[0], result.stats
        print(f"{result.prompt}{output.text}")
        print(
            f"--- {len(output.token_ids)} tokens in {stats.target_calls} target calls, "
            f"{stats.accepted} of {stats.drafted} drafted tokens accepted, distribution: {result.distribution}\n"
        )


if __name__ == "__main__":
    main()
