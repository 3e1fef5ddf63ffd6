"""Talk to a running server (`make serve`) with the official client (`pip install openai`).

python examples/openai_client.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """A completion in one piece, then a conversation as a stream."""
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id

    completion = client.completions.create(
        model=model,
        prompt="def add(a, b):\n",
        max_tokens=32,
        temperature=0,
        extra_body={"include_speculation_stats": True},
    )
    print(completion.choices[0].text)
    print(completion.usage)

    question = "A pen costs 2 dollars and a book costs 5 dollars. What do 3 pens and 2 books cost?"
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=96, temperature=0, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
