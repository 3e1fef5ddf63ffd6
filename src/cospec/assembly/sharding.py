"""From a configuration to the target's model: in this process, or sharded over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cospec.config import EngineConfig
from cospec.core.interfaces import Model
from cospec.distributed.model import ShardedModel
from cospec.distributed.pipeline import Pipeline
from cospec.distributed.stage_host import parse_address, read_token
from cospec.distributed.stage_machines import StageMachines
from cospec.distributed.stage_processes import Launch, StageProcesses, launch_here, plans
from cospec.errors import InvalidInput
from cospec.models.block_manager import BlockPool
from cospec.models.loading import LoadOptions, check_division, load_model, memory_plan
from cospec.models.shard import Shard


def load_target(
    config: EngineConfig,
    models: Sequence[tuple[str, LoadOptions]],
    options: LoadOptions,
    launch: Launch = launch_here,
) -> tuple[Model, Callable[[], None]]:
    """Load the target; returns the function that ends its processes too.

    Args:
        models: name and options of the target and of the drafters that share the memory.
        options: of the target, with the memory of its KV cache.
        launch: starts the process of a shard, where ``config`` names no stage hosts.

    Raises:
        ModelError, InvalidInput: as in ``load_model``; also for shards that the model does not divide into.
    """
    name, _ = models[0]
    stages, ranks = config.pipeline_parallel_size, config.tensor_parallel_size
    if stages == ranks == 1:
        if config.stage_machines:
            raise InvalidInput("stage_machines", list(config.stage_machines), "absent for a target of one process")
        return load_model(name, options), _nothing
    if options.keep_hidden_states:
        raise InvalidInput("pipeline_parallel_size", stages, "1 for a drafter that reads the target's states")
    if len(config.stage_hosts) not in (1, stages):
        raise InvalidInput("stage_hosts", list(config.stage_hosts), f"one address, or {stages}")
    options = replace(options, shard=Shard(stages=stages, ranks=ranks))
    vocab_size = check_division(name, options)
    room = memory_plan(models)
    pages = BlockPool(room.kv_cache_tokens // options.page_size, options.page_size, options.prefix_caching)
    parts = replace(options, budget=None, num_pages=pages.num_pages, max_model_len=room.max_model_len)
    hosts, machines = config.stage_hosts, 1
    if config.stage_machines:
        hosts, machines, launch = ("",), len(config.stage_machines), _stage_machines(config)
    own = plans(name, parts, hosts, config.stage_links, config.threads, machines)
    pipeline = Pipeline(partial(StageProcesses, own, launch), config.stage_timeout)
    return ShardedModel(name, pipeline, pages, (vocab_size, room.max_model_len), stages), pipeline.close


def _stage_machines(config: EngineConfig) -> StageMachines:
    """Return what starts stages on the machines of the configuration."""
    if "stage_hosts" in config.model_fields_set:
        raise InvalidInput("stage_hosts", list(config.stage_hosts), "absent with stage_machines")
    hosts = [parse_address("stage_machines", each) for each in config.stage_machines]
    return StageMachines(hosts, read_token(config.stage_token_file), config.stage_timeout)


def refuse_shards(config: EngineConfig) -> None:
    """Refuse shards of an ensemble, whose models run in the engine's process."""
    for field in ("pipeline_parallel_size", "tensor_parallel_size"):
        given: int = config.model_dump()[field]
        if given != 1:
            raise InvalidInput(field, given, "1 for an ensemble")


def _nothing() -> None:
    """A target in this process has no other process."""
