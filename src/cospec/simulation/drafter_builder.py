"""From a scenario's drafter to the drafter of a simulated engine; pools have the engine's own routing and combiners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cospec.core.plugin_base import Drafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.options import NamedDrafter, check_distributions
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.plugin_options import parse
from cospec.registry import COMBINERS, ROUTINGS
from cospec.rng.random_streams import StreamKind
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.messages import DrafterInfo
from cospec.simulation.clock import Outages, SimulatedExecutor, VirtualClock
from cospec.simulation.recorded_drafter import RecordedDrafter, RecordedMember
from cospec.simulation.scenario import DrafterConfig, MemberConfig
from cospec.simulation.simulated_drafter import DrafterSetting, SimulatedDrafter

LOOKUP = "ngram"


class TimedPart(Protocol):
    """A simulated part that takes time.

    Attributes:
        busy: seconds of its work.
    """

    @property
    def busy(self) -> float: ...


class MemberExecutor(SimulatedExecutor):
    """The executor of a pool's member in a process or on a node of its own.

    Attributes:
        info: the declared attributes of the drafter.
    """

    def __init__(self, drafter: Drafter, member: MemberConfig, clock: VirtualClock) -> None:
        super().__init__(drafter, clock, 1, member.link, Outages([each.span for each in member.outages]))
        self.info = DrafterInfo.of(drafter)


def build_drafter(drafting: DrafterConfig, setting: DrafterSetting) -> tuple[Drafter, Sequence[TimedPart]]:
    """Return a drafter, and all parts that take time.

    Raises:
        InvalidInput: a member, a combiner or a routing does not exist, or an option is wrong.
    """
    if drafting.kind != "recorded":
        cost = drafting.cost.built(setting.folder)
        simulated = SimulatedDrafter(drafting, cost, setting)
        return simulated, [simulated]
    drafters, workers = list[NamedDrafter](), list[TimedPart]()
    for member in drafting.members:
        drafter: Drafter = NgramDrafter()
        if member.name != LOOKUP:
            recorded = _recorded(drafting, member, setting)
            drafter, workers = recorded, [*workers, recorded]
        if drafting.parallel is not None and not drafter.capabilities.costless:
            drafter = DrafterProxy(MemberExecutor(drafter, member, setting.clock))
        drafters.append(NamedDrafter(member.name, drafter))
    if drafting.combiner is None:
        return drafters[0].drafter, workers
    return _pool(drafting, drafters, setting), workers


def _recorded(drafting: DrafterConfig, member: MemberConfig, setting: DrafterSetting) -> RecordedDrafter:
    assert setting.recording is not None, "the scenario was checked"
    cost = (member.cost or drafting.cost).built(setting.folder)
    return RecordedDrafter(
        RecordedMember(setting.recording, member.name, setting.requests), member.name, cost, setting.clock
    )


def _pool(drafting: DrafterConfig, drafters: Sequence[NamedDrafter], setting: DrafterSetting) -> PoolDrafter:
    assert setting.recording is not None and drafting.combiner is not None, "the scenario was checked"
    COMBINERS.check(drafting.combiner, field="combiner")
    ROUTINGS.check(drafting.routing, field="routing")
    combiner, chosen = COMBINERS.load(drafting.combiner)(), ROUTINGS.load(drafting.routing)
    if StreamKind.DRAFT in combiner.stream_kinds:
        check_distributions(drafters, combiner.name)
    routing = chosen.build(parse(chosen.Options, drafting.routing_options, "drafting.routing_options."))
    clock = setting.clock
    members = [Member.of(each.name, each.drafter, clock, combiner.is_stepwise, drafting.deadline) for each in drafters]
    context = PoolContext(setting.recording.vocab_size, clock, drafting.at_most, native=False)
    return PoolDrafter(members, combiner, routing, context)
