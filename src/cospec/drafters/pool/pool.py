"""A pool: several drafters that work together (CoSine section 4.2, Minions section 3.2).

In a step the routing chooses drafters per sequence. Each drafter is called once for all of its sequences, or runs
token by token in lockstep. The combiner makes one draft per sequence. Commits update weights and calibrations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

import numpy as np

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.interfaces import Clock
from cospec.core.plugin_base import Drafter, SoleDrafter, base_of
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import MISSED
from cospec.drafters.draft_subtrees import begun
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.drafters.pool.candidates import draw
from cospec.drafters.pool.combiners.combiner import Combiner, DraftCandidates, VerifiedCandidates
from cospec.drafters.pool.coordinator import Coordinator, PoolConfig
from cospec.drafters.pool.known_token_scoring import KnownTokenScoring
from cospec.drafters.pool.lockstep_session import Draw, LockstepSession
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.options import PoolOptions, build_drafters, check_distributions
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.explore import OutputEmbeddings
from cospec.drafters.pool.routing.routing import Routing, Similarity
from cospec.drafters.pool.state import DraftTask, PoolRequestState, PoolStats, SoleAnswer
from cospec.drafters.pool.whole_drafts import WholeDrafts
from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.registry import COMBINERS, ROUTINGS
from cospec.rng.random_streams import StreamKind

FIRST, SEVERAL = "drafters of a pool score known tokens", "several drafters of a pool"  # why ``propose`` must draft
MISSED_STEPS = "a drafter of a pool missed steps"  # the same: native code counts no hits


@dataclass(frozen=True, slots=True)
class PoolContext:
    """The environment of a pool.

    Attributes:
        vocab_size: of the target.
        at_most: most drafters that take part; a policy may take fewer. None leaves the number to policy and routing.
        native: whether lockstep drafting may be one native call.
        similarity: of two tokens, for a routing that compares.
        draw: of combiners; an enumeration draws otherwise.
    """

    vocab_size: int
    clock: Clock = time.monotonic
    at_most: int | None = None
    native: bool = True
    similarity: Similarity | None = None
    draw: Draw = draw


@dataclass(slots=True)
class PoolSeconds:
    """Time of a pool, in seconds.

    Attributes:
        drafters: in drafters and in reading their logits, a task that a drafter alone would do as well.
        own: in combining, weighting and routing.
    """

    drafters: float = 0.0
    own: float = 0.0


class PoolDrafter(Drafter):
    """Any number of drafters of any kind; each has a name, the source of its tokens.

    ``stream_kinds`` declares which acceptance methods may verify its drafts, see ``combiners.combiner.Combiner``.
    Sequences with another method get no draft.
    """

    samples = True
    drafts_ahead = False  # unless every member proposes whole drafts, and drafts ahead
    learns = True
    reads_hidden_states = False  # unless a member does
    is_pool = True
    member_names: tuple[str, ...]
    stream_kinds: frozenset[StreamKind]
    Options: ClassVar[type[PoolOptions]] = PoolOptions

    def __init__(self, members: Sequence[Member], combiner: Combiner, routing: Routing, setting: PoolContext) -> None:
        self.name = "pool"
        self.members, self.combiner, self.routing, self.setting = tuple(members), combiner, routing, setting
        self.member_names = tuple(member.name for member in self.members)
        self.stream_kinds = combiner.stream_kinds
        self.trusted = all(member.drafter.trusted for member in self.members)
        self.reads_hidden_states = any(member.drafter.reads_hidden_states for member in self.members)
        self.drafts_ahead = all(each.stepper is None and each.drafter.drafts_ahead for each in self.members)
        priced = sum(not member.costless for member in self.members)
        self.capabilities = DrafterCapabilities(
            costless=priced == 0,
            trees=combiner.branches,
            chains=not combiner.branches,
            num_drafters=max(1, min(priced, setting.at_most or priced)),
        )
        self.pool_stats = PoolStats(len(self.members))
        self.seconds = PoolSeconds()
        self._known_tokens = KnownTokenScoring(self.members, routing, self.pool_stats.prior, setting.clock)
        self._steppers = {number: each.stepper for number, each in enumerate(self.members) if each.stepper is not None}
        self._elsewhere = frozenset(number for number, each in enumerate(self.members) if each.steps_elsewhere)
        lockstep = self._elsewhere | self._steppers.keys()
        own = [number for number in range(len(self.members)) if number not in lockstep]
        askable = sorted(own, key=lambda number: not self.members[number].later)
        self.works_elsewhere = priced > 0 and all(each.costless or each.is_parallel for each in self.members)
        self._outcomes = sum([1 << number for number in own if self.members[number].drafter.drafts_for_outcomes])
        self.drafts_for_outcomes = self.drafts_ahead and self._outcomes > 0
        self._whole_drafts = WholeDrafts(self.members, askable, combiner, setting.clock, routing.scores_known_tokens)
        self.records: dict[str, PoolRequestState] = {}  # state by request id
        pool_config = PoolConfig(
            self.member_names,
            combiner,
            routing,
            sum([1 << number for number, each in enumerate(self.members) if each.costless]),
            self._unscored(),
            lockstep,
            combiner.gathers and routing.weighs,
            setting.similarity if routing.compares else None,
        )
        self.coordinator = Coordinator(pool_config, self.pool_stats)
        self.never_alone = "" if pool_config.may_draft_alone else SEVERAL

    @classmethod
    def build(cls, options: PoolOptions, build_context: DrafterBuildContext) -> PoolDrafter:
        """Build every drafter; errors name the drafter."""
        combiner, chosen = COMBINERS.load(options.combiner)(), ROUTINGS.load(options.routing)
        where = "speculative_config.routing_options."
        routing = chosen.build(parse(chosen.Options, options.routing_options, where))
        drafters = build_drafters(options, build_context)
        if StreamKind.DRAFT in combiner.stream_kinds:
            try:
                check_distributions(drafters, options.combiner, options.token_steps is not False)
            except InvalidInput:
                for each in drafters:
                    each.drafter.close()
                raise
        clock = time.monotonic
        needs_q = StreamKind.DRAFT in combiner.stream_kinds
        steps = combiner.is_stepwise, options.deadline, needs_q if options.token_steps is None else options.token_steps
        members = [Member.of(each.name, each.drafter, clock, *steps) for each in drafters]
        embeddings = OutputEmbeddings.find(build_context.target_path) if routing.compares else None
        context = PoolContext(
            build_context.target.vocab_size,
            clock,
            options.at_most,
            build_context.native,
            None if embeddings is None else embeddings.similarity,
        )
        return cls(members, combiner, routing, context)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return one combined draft for each context with a guess of any drafter.

        Where no able drafter drafts after outcomes, a draft after outcomes continues all assumed tokens alone.
        """
        setting, before = self.setting, self._drafter_seconds()
        started = setting.clock()
        for member in self.members:
            member.begin_step()
        self._known_tokens.collect(self.records)
        budgets, begins = self._continue_all(contexts, budgets)
        self.prepare(contexts, budgets)
        draft_tasks = self._select_tasks(contexts, budgets)
        drafts: list[Draft] = []
        reading = 0.0
        if draft_tasks:
            loads = [member.load for member in self.members]
            unscored = self._unscored()
            if unscored != self.coordinator.pool_config.unscored:  # nodes joined or left
                self.coordinator.pool_config = replace(self.coordinator.pool_config, unscored=unscored)
            depths = self.coordinator.choose(draft_tasks, loads)
            given = self._whole_drafts.ask(draft_tasks, depths)
            fixed = setting.vocab_size, setting.clock, self.pool_stats.calibrations, setting.draw, setting.native
            needs_q = StreamKind.DRAFT in self.stream_kinds
            session = LockstepSession(self._steppers, self.members, *fixed, self._elsewhere, needs_q)
            drafts = self.coordinator.combine(draft_tasks, given, session)
            reading = session.reading
            for draft_task in draft_tasks:
                if draft_task.budget.outcomes:
                    self.records[draft_task.context.id].ahead = draft_task.record.ahead
        self._forget_lost()
        inside = self._drafter_seconds() - before + reading
        self.seconds.drafters += inside
        self.seconds.own += setting.clock() - started - inside
        return [begun(draft, begins[draft.id]) if begins.get(draft.id) else draft for draft in drafts]

    def _continue_all(
        self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]
    ) -> tuple[Sequence[DraftBudget], Mapping[str, Sequence[int]]]:
        """Return budgets without outcomes where no able drafter takes these, and what such drafts then begin with."""
        continuing = [context for context, budget in zip(contexts, budgets, strict=True) if budget.outcomes]
        able = self._present & self._outcomes if continuing else 0
        begins = {each.id: each.tokens[each.committed_len :] for each in continuing if not self._able(each, able)}
        if begins:
            pairs = zip(contexts, budgets, strict=True)
            budgets = [replace(each, outcomes=False) if context.id in begins else each for context, each in pairs]
        return budgets, begins

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit in every drafter, and learn how right each drafter was."""
        started, records = self.setting.clock(), self.records
        known_commits, finished = list[tuple[PoolRequestState, Commit]](), list[PoolRequestState]()
        continued = list[tuple[PoolRequestState, Commit]]()
        for commit in commits:
            record = records.get(commit.id)
            if record is None:
                continue
            record.sole = None
            drafted_alone = record.alone >= 0 and commit.drafted > 0
            if drafted_alone:
                others = record.candidate_sets if commit.base_len == record.base else {}
                verified = VerifiedCandidates(len(commit.path), commit.rejected, commit.drafted)
                record.candidate_sets = {**others, record.alone: verified}
                record.weights.steps += 1
                record.weights.took_part([record.alone])
            if (drafted_alone or commit.base_len == record.base) and commit.tokens:
                known_commits.append((record, commit))
            else:
                record.candidate_sets = {}
            record.base = -1
            if record.ahead:
                continued.append((record, commit))
            if commit.finish is not None:
                finished.append(record)
        if known_commits:
            self.coordinator.learn(known_commits)
        for record, commit in continued:
            record.continue_ahead(commit)
        for record in finished:
            self.pool_stats.learn(record)
        self.seconds.own += self.setting.clock() - started
        for member in self.members:
            member.commit(commits)
        self._forget_lost()

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences in the pool and in every drafter."""
        for id in ids:
            self.records.pop(id, None)
        for member in self.members:
            member.forget(ids)

    def close(self) -> None:
        """End the threads and processes of the drafters."""
        for member in self.members:
            member.drafter.close()

    def weights(self) -> Mapping[str, float]:
        """Return the mean weight of each drafter over the present requests; a new request's weights if there are
        none."""
        records = [record.weights for record in list(self.records.values())] or [DrafterWeights(len(self.members))]
        mean = np.mean([weights.weights(self.pool_stats.prior) for weights in records], axis=0)
        return dict(zip(self.member_names, mean.tolist(), strict=True))

    def left_out(self) -> Mapping[str, int]:
        """Return how often each drafter failed or was late."""
        return {member.name: member.left_out.total() for member in self.members}

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        """Count the time of a block as the pool's own, apart from the time of its drafters."""
        started, before = self.setting.clock(), self._drafter_seconds()
        yield
        self.seconds.own += self.setting.clock() - started - (self._drafter_seconds() - before)

    def _drafter_seconds(self) -> float:
        """Return the seconds spent in drafters so far."""
        return sum([member.seconds for member in self.members])

    def _select_tasks(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[DraftTask]:
        """Return tasks for the sequences with able drafters."""
        draft_tasks, present = list[DraftTask](), self._present
        for context, budget in zip(contexts, budgets, strict=True):
            able = self._able_within(context, budget, present)
            if not able:
                continue
            record = self._record(context)
            if context.assumed or budget.outcomes:  # the state of the draft under verification stays until its commit
                record = PoolRequestState(record.weights, record.greedy)
            record.weights.steps += 1
            record.base, record.alone, record.sole = base_of(context, budget), -1, None
            draft_tasks.append(DraftTask(context, budget, record, able, self._bound(budget)))
        return draft_tasks

    def _able_within(self, context: DraftContext, budget: DraftBudget, present: int) -> int:
        """Return the members that may draft for a sequence under a budget, as bits; ``present``: see ``_present``."""
        if budget.depth < 1 or budget.max_nodes < 1 or context.stream_kind not in self.stream_kinds:
            return 0
        return self._able(context, present) & (self._outcomes if budget.outcomes else -1)

    def _record(self, context: DraftContext) -> PoolRequestState:
        record = self.records.get(context.id)
        if record is None:
            record = self.records[context.id] = self.pool_stats.start(context)
        return record

    def _bound(self, budget: DraftBudget) -> int | None:
        """Return the most drafters with a cost that take part; None leaves the number to the routing."""
        most, wanted = self.setting.at_most, budget.drafters
        return most if wanted is None or (most is not None and most < wanted) else wanted

    def prepare(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> None:
        """See ``Drafter``: drafters score the prompts of most new requests, and at times later tokens."""
        present = self._present
        due = [
            context
            for context, budget in zip(contexts, budgets, strict=True)
            if self._able_within(context, budget, present)
            and not context.assumed
            and self._known_tokens.is_due(self._record(context).weights)
        ]
        if due:
            self.scoring_seconds += self._known_tokens.score(due, self.records)
            self._forget_lost()

    def drafts_alone(self, context: DraftContext, budget: DraftBudget) -> SoleDrafter | str:
        """See ``Drafter``: one member, where the combined draft would be its draft."""
        if self.never_alone:
            return self.never_alone
        record = self.records.get(context.id)
        if record is None or self._known_tokens.is_due(record.weights):
            return FIRST
        known, sole = len(context.tokens), record.sole
        if sole is None or sole.known != known or sole.budget is not budget:
            with self._own_time():
                sole = record.sole = SoleAnswer(known, budget, self._sole(context, budget, record))
        return sole.found

    def _sole(self, context: DraftContext, budget: DraftBudget, record: PoolRequestState) -> SoleDrafter | str:
        if self.coordinator.pool_config.unscored != self._unscored() or context.stream_kind not in self.stream_kinds:
            return SEVERAL
        able = self._able(context, self._present)
        task = DraftTask(context, budget, record, able, self._bound(budget))
        loads = [member.load for member in self.members]
        found = self.coordinator.pool_config.alone(task, record.weights.weights(self.pool_stats.prior), loads)
        if found is None:
            return SEVERAL
        number, heavier = found
        sole = self.members[number]
        if sole.deadline is not None or sole.later:
            return SEVERAL
        cache = sole.drafter.draft_kv_cache if self.routing.scores_known_tokens else None
        known = len(context.tokens)  # the hits are counted among the outputs alone
        if cache is not None and min(cache.backlog_len(context.id, known), known - context.prompt_len) >= MISSED:
            return MISSED_STEPS
        if any([self.members[other].propose([context], [budget]) for other in heavier]):  # lookups change no state
            return SEVERAL
        return SoleDrafter(sole.name, sole.drafter)

    def begin_native(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> None:
        """See ``Drafter``: drafters without cost propose too, so that the pool learns how right they are."""
        for context, budget in zip(contexts, budgets, strict=True):
            sole, record = self.drafts_alone(context, budget), self.records[context.id]
            assert not isinstance(sole, str), "the caller has asked"
            record.alone, record.base = self.member_names.index(sole.name), len(context.tokens)
            record.candidate_sets = {}
        present = self._present
        with self._own_time():
            for number, member in enumerate(self.members):
                asked = [self._able(context, present) >> number & 1 for context in contexts] if member.costless else [0]
                if any(asked):
                    for draft in member.propose(list(compress(contexts, asked)), list(compress(budgets, asked))):
                        record = self.records[draft.id]
                        record.candidate_sets = {**record.candidate_sets, number: DraftCandidates(draft)}

    @property
    def _present(self) -> int:
        """The members that can take part now, as bits."""
        return sum([1 << number for number, member in enumerate(self.members) if member.present])

    def _able(self, context: DraftContext, present: int) -> int:
        """Return the ``present`` members that may take part for a sequence, as bits."""
        if context.drafters is None:
            return present
        return present & sum([1 << number for number, name in enumerate(self.member_names) if name in context.drafters])

    def _unscored(self) -> frozenset[int]:
        """Return the drafters that cannot score known tokens now."""
        members = enumerate(self.members)
        return frozenset([number for number, each in members if not (each.costless or each.scores_known_tokens)])

    def _forget_lost(self) -> None:
        """Free all sequences of a drafter that raised, because its state is undefined."""
        for member in self.members:
            if member.lost:
                member.lost = False
                member.forget(list(self.records))
