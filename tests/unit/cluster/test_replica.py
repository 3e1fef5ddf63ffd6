"""What a replica says of a request that its engine does not take or does not finish."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cospec.config import EngineConfig
from cospec.core.types import Request
from cospec.runtime.codec import Codec
from cospec.runtime.engine_supervision import Supervision
from cospec.runtime.messages import Events, Failed
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from server.fake_engine import FakeEngine, write_tokenizer

pytest.importorskip("ray", reason="the extra cluster is not installed")

from cospec.cluster.replica import EngineReplica, StreamItem, Unavailable


class LocalReplica(EngineReplica):
    """A replica outside Ray Serve, which awaits constructors and destructors; Python does not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def ask(replica: EngineReplica, tokenizer: Tokenizer, text: str, **given: Any) -> asyncio.Task[list[StreamItem]]:
    (request,) = make_requests(f"r-{text}", tokenizer.encode(text).ids, SamplingParams(max_tokens=100, **given))
    encoded = [bytes(part) for part in Codec(Request).encode(request)]

    async def items() -> list[StreamItem]:
        return [Codec(StreamItem).decode(parts) async for parts in replica.generate(encoded, (), 0.0)]

    return asyncio.create_task(items())


def test_a_request_goes_on_elsewhere_when_the_engine_has_ended(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = EngineConfig(model="fake", tokenizer=str(folder))

    async def main() -> list[StreamItem]:
        replica = object.__new__(LocalReplica)
        await replica.__init__(config, Supervision(max_restarts=0), build=FakeEngine.build)  # type: ignore[misc]
        try:
            (*_, whole) = await ask(replica, tokenizer, "ab", temperature=0)
            assert isinstance(whole, Events)
            assert whole.events[-1].finish is not None
            for items in await asyncio.gather(
                ask(replica, tokenizer, "DIE", temperature=0), ask(replica, tokenizer, "SLOW", temperature=1)
            ):
                assert not any(isinstance(item, Failed) for item in items)
            return await ask(replica, tokenizer, "ab", temperature=0)
        finally:
            await EngineReplica.__del__(replica)

    (late,) = asyncio.run(asyncio.wait_for(main(), 50))
    assert isinstance(late, Unavailable)
