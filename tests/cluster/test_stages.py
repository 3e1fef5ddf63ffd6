"""A target in several processes writes the tokens of a target in this process, also when processes die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cospec.config import LinkConfig
from cospec.core.engine import Engine
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, FinishReason
from cospec.distributed.model import ShardedModel
from cospec.distributed.pipeline import STARTS
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.execution.windows_in_flight import WindowsInFlight
from cospec.models.block_manager import BlockPool
from cospec.models.loading import LoadOptions
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.sampling_params import SamplingParams
from harness.llamas import PAGE, VOCAB, llama_engine, load
from harness.nodes import NodeProcess, hub_for_tests, on_nodes
from harness.overlap import under
from harness.pools import pool_of
from harness.sharded_targets import PARAMS, Folders, disturbed, outputs, requests, running, sharded
from harness.shards import ShardsHere, TargetOfShards
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of
from harness.waiting import until

pytestmark = pytest.mark.cluster

Outputs = dict[str, tuple[int, ...]]
START_RATE = 0.5  # of a drafter that no request has seen
LAYOUTS = [(2, 1), (4, 1), (1, 2)]  # pipeline stages, tensor ranks
GRID = [(stages, ranks) for stages in (1, 2, 4) for ranks in (1, 2) if stages * ranks > 1]
SOME_TREE = [3, 9, 27, 4, 12, 36, 5], [-1, -1, 0, 1, 1, 4, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders.write(tmp_path_factory.mktemp("models"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of ``target`` with some layouts, or with all of ``--grid``; faults with two stages or two ranks."""
    if "stage" in metafunc.fixturenames:
        metafunc.parametrize("target", [(2, 1)], ids=["pp2-tp1"], indirect=True, scope="module")
    elif "rank" in metafunc.fixturenames:
        metafunc.parametrize("target", [(1, 2)], ids=["pp1-tp2"], indirect=True, scope="module")
    elif "target" in metafunc.fixturenames:
        layouts = GRID if metafunc.config.getoption("--grid") else LAYOUTS
        ids = [f"pp{stages}-tp{ranks}" for stages, ranks in layouts]
        metafunc.parametrize("target", layouts, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def target(folders: Folders, request: pytest.FixtureRequest) -> Iterator[ShardedModel]:
    with sharded(folders, *request.param, stage_timeout=5.0) as model:
        yield model


def drafters(folders: Folders) -> dict[str, Callable[[], Drafter | None]]:
    return {
        "none": lambda: None,
        "model": lambda: ModelDrafter(load(folders.drafter)),
        "ngram": lambda: NgramDrafter(1, 3),
        "tree": lambda: ScriptedDrafter(*SOME_TREE),
    }


def test_logits_have_the_bits_of_one_process(folders: Folders, target: ShardedModel, request: Any) -> None:
    stages, ranks = request.node.callspec.params["target"]
    model, found = ShardsHere(folders.target, stages, ranks, LoadOptions(page_size=PAGE)), []
    for each in (model, target):
        each.pages.allocate("a", 48)
        first = TokenBatch((SequenceSlice("a", 0, tuple(range(20)), (-1, 0, -1), 3),))
        second = TokenBatch((SequenceSlice("a", 17, (5, 6), (), 0),))
        found.append(torch.cat([each.forward(first), each.forward(second)]))
    target.free(["a"])
    assert torch.equal(*found)


def test_processes_listen_on_the_loopback_address_alone(target: ShardedModel) -> None:
    """The sockets of torch.distributed included, which checks no secret."""
    addresses = {
        connection.laddr.ip
        for pid in target.pipeline.pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1"}


@pytest.mark.parametrize("stage", [1])
def test_each_link_has_its_own_delay(target: ShardedModel, stage: int) -> None:
    batch = TokenBatch((SequenceSlice("a", 0, (1, 2, 3), (), 2),))
    target.pages.allocate("a", 16)
    target.forward(batch)
    for delays in ((0.2, 0.0), (0.0, 0.2), (0.2, 0.1)):
        target.pipeline.set_links([LinkConfig(delay=each) for each in delays])
        started = time.monotonic()
        target.forward(batch)
        assert time.monotonic() - started > sum(delays)
    target.pipeline.set_links([LinkConfig(), LinkConfig()])
    target.free(["a"])


def without_drafts(folders: Folders, target: ShardedModel, params: SamplingParams, ranks: int) -> Outputs:
    """What one process writes, which adds the products of shards in their order where a sharded target has several."""
    if ranks == 1:
        return outputs(load(folders.target), None, params)
    return outputs(TargetOfShards(folders.target, ranks, LoadOptions(page_size=PAGE), target), None, params)


def test_tokens_are_those_of_one_process(folders: Folders, target: ShardedModel, request: Any) -> None:
    _, ranks = request.node.callspec.params["target"]
    for params in PARAMS.values():
        wanted = without_drafts(folders, target, params, ranks)
        for make in drafters(folders).values():
            assert outputs(target, make(), params, k=3, max_nodes=7) == wanted
            assert target.pages.usage == 0


@pytest.fixture
def nodes(folders: Folders) -> Iterator[dict[str, DrafterProxy]]:
    """Three drafters, each on a node in a process of its own."""
    pytest.importorskip("zmq")
    offers: dict[str, Callable[[], Drafter]] = {
        "model": lambda: ModelDrafter(load(folders.drafter)),
        "itself": lambda: ModelDrafter(load(folders.target)),
        "other": lambda: ModelDrafter(load(folders.drafter)),
    }
    hub = hub_for_tests(VOCAB)
    drafters = {name: on_nodes(hub, name)[0] for name in offers}
    processes = [NodeProcess(hub.address, [(name, build)], vocab_size=VOCAB) for name, build in offers.items()]
    try:
        until(lambda: sum(row["state"] == "ready" for row in hub.status()) == len(offers), "three nodes")
        yield drafters
    finally:
        for process in processes:
            process.close()
        for slot in list(hub.slots.values()):
            hub.remove(slot)


@pytest.mark.parametrize(
    ("combiner", "execution_mode"),
    [("union", "sequential"), ("fuse", "draft-ahead"), ("fuse", "draft-for-outcomes"), ("fuse", "pipelined")],
)
def test_tokens_of_three_drafter_nodes(
    folders: Folders,
    target: ShardedModel,
    nodes: dict[str, DrafterProxy],
    combiner: str,
    execution_mode: str,
    request: Any,
) -> None:
    """A sharded target verifies what three nodes draft; tokens are those of one process without drafts."""
    _, ranks = request.node.callspec.params["target"]
    pool = pool_of(nodes, combiner, "all", VOCAB)
    executor = "inline" if execution_mode == "sequential" else "worker"
    for name in ("greedy", "seeded"):
        params = PARAMS[name]
        wanted = without_drafts(folders, target, params, ranks)
        engine = under(llama_engine(target, pool, k=3, max_nodes=7), execution_mode, executor)
        assert tokens_of(run_all(engine, requests(params))) == wanted
        assert engine.metrics().accepted_tokens["itself"] > 0
        assert target.pages.usage == 0
    assert all(rate != START_RATE for rate in pool.pool_stats.prior.rates), "a node never answered"


def test_tokens_are_the_same_under_preemption(folders: Folders, target: ShardedModel) -> None:
    """Few pages: sequences lose their caches, prefixes are found again, prompts are computed in pieces."""
    params, preempted = PARAMS["seeded"], 0
    wanted = outputs(target, None, params)
    few = BlockPool(14, PAGE)
    small = ShardedModel(target.name, target.pipeline, few, (VOCAB, 96), target.max_in_flight)
    for make in drafters(folders).values():
        engine = llama_engine(small, make(), k=3, max_nodes=7, max_num_batched_tokens=24)
        assert tokens_of(run_all(engine, requests(params))) == wanted
        preempted += engine.metrics().num_preemptions
        assert engine.metrics().prefix_cache_hits > 0
    assert preempted > 0
    target.pages.forget_contents()  # both accountings used the same pages


def test_windows_are_in_flight_together(target: ShardedModel) -> None:
    engine = llama_engine(target, None)
    most = 0
    for request in requests(PARAMS["greedy"]):
        engine.add(request)
    while engine.has_work:
        engine.step()
        most = max(most, engine.metrics().steps_in_flight)
    assert most == target.max_in_flight - 1  # one was collected
    assert engine.metrics().target_calls > 0


def test_one_request_has_several_windows_in_flight(folders: Folders, target: ShardedModel) -> None:
    """Tokens are those without drafts; stages pass refuted windows on, and a drafter that is right has none."""
    for name in ("greedy", "seeded"):
        (request, *_) = requests(PARAMS[name])
        wanted = tokens_of(run_all(llama_engine(target, None), [request]))
        for folder in (folders.drafter, folders.target):
            engine = under(llama_engine(target, ModelDrafter(load(folder)), k=2), "draft-ahead", "worker")
            windows = engine.execution_mode.windows_ahead
            if isinstance(windows, WindowsInFlight):
                windows.least_probability = 0.0  # also for the drafter that is often wrong
            assert tokens_of(run_all(engine, [request])) == wanted
            metrics = engine.metrics()
            assert (metrics.drafts_ahead["in flight"] > 0) == (target.max_in_flight > 1)
            assert metrics.cancelled_steps > 0 or target.max_in_flight == 1 or folder == folders.target
            assert target.pages.usage == 0


@pytest.mark.parametrize("stage", [1])
def test_a_stage_skips_a_cancelled_window(target: ShardedModel, stage: int) -> None:
    """The cancellation overtakes the window, which waits for the link to the stage."""
    batch, wrong, sent = TokenBatch((SequenceSlice("a", 0, tuple(range(20)), (), 0),)), [], []
    target.pages.allocate("a", 32)
    wanted = target.forward(batch)
    target.pipeline.set_links([LinkConfig(delay=0.3), LinkConfig()])
    for cancels in (False, True):
        before = target.pipeline.result_bytes
        future = target.submit(batch)
        if cancels:
            future.cancel()
        wrong.append(not torch.equal(target.forward(batch), wanted))
        sent.append(target.pipeline.result_bytes - before)
    target.pipeline.set_links([LinkConfig(), LinkConfig()])
    target.free(["a"])
    assert not any(wrong)
    assert sent[0] - sent[1] > 0.9 * wanted.nbytes, "the last stage returns no logits of the cancelled window"


class LostCommits(ShardedModel):
    """Wrong on purpose: no window says where accepted nodes move to."""

    def commit(self, commits: Sequence[Commit]) -> None:
        pass


def test_a_window_without_its_commits_is_seen(folders: Folders, target: ShardedModel) -> None:
    """The control: the tree's accepted branch must move in the caches of all stages."""
    params = PARAMS["greedy"]
    plain = outputs(load(folders.target), None, params)
    draft = lambda: Prophet(plain)  # noqa: E731
    assert outputs(target, draft(), params, k=3, max_nodes=6) == plain
    lost = LostCommits(target.name, target.pipeline, target.pages, (VOCAB, target.max_len), target.max_in_flight)
    assert outputs(lost, draft(), params, k=3, max_nodes=6) != plain


class Prophet(ScriptedDrafter):
    """Drafts a tree whose last branch is right."""

    def __init__(self, texts: dict[str, tuple[int, ...]]) -> None:
        super().__init__([0, 0, 0, 0, 0], [-1, -1, 1, 2, 3])
        self._texts = texts

    def propose(self, contexts: Any, budgets: Any) -> Any:
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            text = self._texts[context.id][len(context.tokens) - context.prompt_len :][:4]
            (draft,) = super().propose([context], [budget])
            wrong = (1 + (text[0] if text else 0)) % VOCAB
            drafts.append(
                draft.__class__(
                    draft.id,
                    draft.base_len,
                    (wrong, *text),
                    (-1, -1, *range(1, len(text)))[: 1 + len(text)],
                    draft.drafters[: 1 + len(text)],
                )
            )
        return drafts


@pytest.mark.parametrize(
    ("stage", "how", "execution_mode"),
    [(0, signal.SIGKILL, "sequential"), (1, signal.SIGKILL, "draft-ahead"), (1, signal.SIGSTOP, "sequential")],
)
def test_a_killed_or_frozen_stage_costs_no_token(
    folders: Folders,
    target: ShardedModel,
    stage: int,
    how: signal.Signals,
    execution_mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = outputs(load(folders.target), None, PARAMS["seeded"])
    engine = under(llama_engine(target, ModelDrafter(load(folders.drafter)), k=3), execution_mode)
    assert outputs_of_disturbed(engine, target, stage, how) == wanted
    assert sum("processes are lost" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("rank", "how"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_killed_or_frozen_rank_costs_no_token(
    folders: Folders, target: ShardedModel, rank: int, how: signal.Signals
) -> None:
    """The other rank waits for the product of the lost rank."""
    wanted = outputs(target, None, PARAMS["seeded"])
    engine = llama_engine(target, ModelDrafter(load(folders.drafter)), k=3)
    assert outputs_of_disturbed(engine, target, rank, how) == wanted


def outputs_of_disturbed(engine: Engine, target: ShardedModel, process: int, how: signal.Signals) -> Outputs:
    """The tokens of requests while a process of the target is killed or frozen; all processes are replaced once."""
    old, starts = target.pipeline.pids, target.pipeline.starts
    found = disturbed(engine, partial(os.kill, old[process], how))
    assert engine.metrics().verifier_losses == 1 and target.pipeline.starts == starts + 1
    assert set(old).isdisjoint(target.pipeline.pids) and not any(map(running, old))
    return tokens_of(found)


def test_processes_that_are_lost_again_and_again_are_not_started_again(tmp_path: Path) -> None:
    folders = Folders.write(tmp_path)
    with sharded(folders, 2) as target:
        engine = llama_engine(target, None)
        for starts in range(1, STARTS + 1):
            assert target.pipeline.starts == starts
            target.pipeline.lose("a test")
            run_all(engine, [make_request("r", [1, 2, 3], SamplingParams(max_tokens=2))])
        assert "lost 4 times in a row" in str(engine.ended)
        assert target.pipeline.starts == STARTS


def test_requests_get_one_error_when_the_target_cannot_restart(tmp_path: Path) -> None:
    folders = Folders.write(tmp_path)
    with sharded(folders, 2) as target:
        pids = target.pipeline.pids
        assert all(map(running, pids))

        def destroy() -> None:
            (folders.target / "model.safetensors").unlink()
            os.kill(pids[0], signal.SIGKILL)

        engine = llama_engine(target, None)
        assert engine.ended is None
        found = disturbed(engine, destroy)
        assert "cannot be started again" in str(engine.ended)
        ends = [own[-1] for own in found.values()]
        assert all(end.finish is FinishReason.ERROR and "cannot be started again" in (end.error or "") for end in ends)
    assert not any(map(running, pids))
