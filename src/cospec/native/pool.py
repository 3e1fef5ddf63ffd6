"""A pool's own work in the native library, one call for all sequences: the same bits as ``readable``.

What is read from logits is read there too, where rows are plain: neither edited nor truncated. Board and library are
in ``board`` and ``csrc/spec/pool_batch.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from torch import Tensor

from cospec.core.rng import Floats
from cospec.core.types import Commit, Draft, DraftContext
from cospec.drafters.pool.candidates import distributions, draw, top_candidates
from cospec.drafters.pool.combiners.combine import Candidate
from cospec.drafters.pool.lockstep_session import LockstepSession, MemberLogits
from cospec.drafters.pool.reference import PoolConfig
from cospec.drafters.pool.routing.all import AllDrafters
from cospec.drafters.pool.state import DraftTask, Given, PoolRequestState, PoolStats
from cospec.drafters.prompt_scoring import reads_natively
from cospec.native import library, pool_lockstep
from cospec.native.pool_buffers import BufferPool, PoolBuffers, at, ints, pool_cdll
from cospec.native.structs import DrafterLogitsStruct, MixBuffersStruct, words

MOST_MEMBERS = 64  # who is able stands in the bits of a word
ROWS = words(DrafterLogitsStruct)


class NativePool:
    """See ``record.Work``. It knows the combiners and routings of this package; ``can`` tells."""

    def __init__(self, pool_config: PoolConfig, pool_stats: PoolStats) -> None:
        self.pool_config, self.pool_stats = pool_config, pool_stats
        assert pool_config.combiner.native_id is not None, "``can`` was not asked"
        self._make = COMBINERS[pool_config.combiner.native_id]
        self._routing = AllDrafters.native_id if pool_config.allots else pool_config.routing.native_id
        self._board: PoolBuffers | None = None
        self._buffer_pool = BufferPool(pool_stats)
        self._novelty: int | None = library.address(pool_stats.novelty) if pool_config.allots else None
        self._silent = sum([1 << member for member in pool_config.silent])
        self._asked: list[list[int]] = []

    @staticmethod
    def can(pool_config: PoolConfig) -> bool:
        """Whether the library is there and has what the pool does."""
        known = pool_config.combiner.native_id is not None and pool_config.routing.native_id is not None
        return library.available() and known and len(pool_config.names) <= MOST_MEMBERS

    def choose(self, draft_tasks: Sequence[DraftTask]) -> list[list[int]]:
        """See ``record.Work``."""
        pool_config = self.pool_config
        board = self._board = PoolBuffers(draft_tasks, self._buffer_pool, pool_config.combiner.steps)
        to, novelty = board.space.asked_at, self._novelty
        pool_cdll().cospec_pool_route(board.ref, pool_config.free, self._silent, self._routing, novelty, to)
        self._asked = board.asked()
        return self._asked

    def combine(
        self, draft_tasks: Sequence[DraftTask], given: Sequence[Given], session: LockstepSession
    ) -> list[Draft]:
        """See ``record.Work``."""
        board = self._board
        assert board is not None and board.draft_tasks is draft_tasks, "combined before it was chosen who takes part"
        self._board = None
        board.give(given)
        for row, draft_task in enumerate(draft_tasks):
            draft_task.record.said = board, row
        found: list[Draft] = self._make(NativeTable(board, session, self.pool_config, self._asked, self._novelty))
        return found

    def learn(self, commits: Sequence[tuple[PoolRequestState, Commit]]) -> None:
        """See ``record.Work``."""
        boards: dict[PoolBuffers, list[int]] = {}  # several where drafts of several rounds come to be
        for record, commit in commits:
            (board, row), record.said = record.said, None
            words = boards.get(board)
            if words is None:
                words = boards[board] = []
            words += (row, len(commit.path), len(commit.tokens))
            words += commit.tokens
        for board, words in boards.items():
            told = array("q", words)
            pool_cdll().cospec_pool_feedback(board.ref, at(told), len(told), self.pool_config.routing.learns)


@dataclass(slots=True)
class NativeTable:
    """What one combiner works at."""

    board: PoolBuffers
    session: LockstepSession
    pool_config: PoolConfig
    asked: Sequence[Sequence[int]]  # ``[M][R]``, as chosen
    novelty: int | None  # where ``PoolStats.novelty`` is, for those that learn it
    taking: Mapping[int, list[int]] = field(default_factory=dict)  # the sequences that each drafter is led along
    plain: bool = False  # no row is edited or truncated
    native: bool = True  # the library has read all rows, of the latest position
    probs: int | None = None  # where there is room for distributions
    stride: int = 0  # bytes from those of one position to the next; 0 where they need not be kept

    def drafts(self, q: Floats | None = None) -> list[Draft]:
        """What is on the board."""
        return self.board.drafts(self.pool_config.names, self.pool_config.combiner.branches, q)

    def open(self) -> None:
        """Who is led along which sequences, and whether the library can read what they say."""
        self.plain = all([draft_task.record.plain for draft_task in self.board.draft_tasks])
        rows = range(self.board.rows)
        taking = {member: list(compress(rows, self.asked[member])) for member in sorted(self.pool_config.led)}
        self.taking = {member: own for member, own in taking.items() if own}

    def lead(
        self, read: Callable[[NativeTable], None], advance: Callable[[], object], mixing: MixBuffersStruct | None = None
    ) -> None:
        """Those that take part, until no spine is going; ``read`` writes down what everybody says who is led.

        ``mixing`` is for the library, which knows what to read and how to advance.
        """
        if self.plain and pool_lockstep.lead(self.board, self.session, self.taking, mixing):
            return
        draft_tasks = self.board.draft_tasks
        contexts, depths = (
            [draft_task.context for draft_task in draft_tasks],
            [min(b.depth, b.max_nodes) for _, b, *_ in draft_tasks],
        )
        self.session.open(contexts, depths, self.taking)
        while True:
            self.session.timed(read, self)
            advance()
            fed = self.board.fed()
            if not fed:
                return
            self.session.feed(fed)

    def readable(self) -> tuple[list[tuple[int, MemberLogits]], array[int], array[int], list[Tensor]]:
        """Who has to be read in Python; of the others ``DrafterLogitsStruct`` of ``csrc/spec/pool_batch.h``, the
        sequences of their rows, and what has to be kept while that is read."""
        others, words, places, held = list[tuple[int, MemberLogits]](), list[int](), list[int](), list[Tensor]()
        for member, stand in self.session.stands.items():
            rows, _, logits = stand
            if self.plain and reads_natively(logits):
                logits = logits.contiguous()
                words += (member, logits.data_ptr(), logits.shape[1], len(rows))
                places += rows
                held.append(logits)
            else:
                others.append((member, stand))
        self.native = not others
        return others, array("Q", words), array("q", places), held

    def asked_for(self, stand: MemberLogits) -> tuple[Tensor, list[DraftContext], list[list[int]]]:
        """Logits, contexts and paths of one drafter's rows."""
        board, (rows, _, logits) = self.board, stand
        return logits, [board.draft_tasks[row].context for row in rows], [board.path(row) for row in rows]


def _unite(table: NativeTable) -> list[Draft]:
    pool_cdll().cospec_pool_union(table.board.ref, table.novelty)
    return table.drafts()


def _elect(table: NativeTable) -> list[Draft]:
    pool_cdll().cospec_pool_vote(table.board.ref)
    return table.drafts()


def _fuse(table: NativeTable) -> list[Draft]:
    board = table.board

    def advance() -> None:
        board.c.steps += 1
        pool_cdll().cospec_pool_fuse(board.ref)

    table.open()
    table.lead(_hear, advance)
    return table.drafts()


def _hear(table: NativeTable) -> None:
    """Tokens and confidences."""
    board, (others, said, places, _held) = table.board, table.readable()
    if said:
        pool_cdll().cospec_pool_read_candidates(board.ref, at(said), len(said) // ROWS, at(places))
    for member, stand in others:
        for row, guess in zip(stand.rows, top_candidates(*table.asked_for(stand)), strict=True):
            if guess is not None:
                _note(board, board.place_of(member, row), guess)


def _note(board: PoolBuffers, place: int, guess: Candidate) -> None:
    """What the library writes of rows that it reads."""
    space = board.space
    tokens, chances = space.guessed + 2 * place, space.chances + 2 * place
    space.ints[tokens], space.floats[chances] = guess.token, guess.confidence
    if guess.second is not None:
        space.ints[tokens + 1], space.floats[chances + 1] = guess.second


def _mix(table: NativeTable) -> list[Draft]:
    board, vocab, records = (
        table.board,
        table.session.vocab_size,
        [draft_task.record for draft_task in table.board.draft_tasks],
    )
    table.open()
    mixtures, place, kept, q = None, None, 1, None
    if any([record.draws for record in records]):
        own = any([record.keeps for record in records])
        kept = board.depth if own else 1
        said = vocab * sum([len(rows) for rows in table.taking.values()])
        if own:  # handed on with the drafts, which may outlive the board
            mixtures = q = np.empty((board.rows, kept, vocab))
            place, table.stride = library.address(q), 8 * said
        else:
            mixtures, place = board.space.large("mixtures", board.rows * vocab)
        table.probs = board.space.large("laws", said * kept)[1]

    def advance() -> None:
        pool_cdll().cospec_pool_mix(board.ref, vocab, place, kept)
        if mixtures is not None:
            chosen = None if table.native else _chosen(table, mixtures.reshape(-1, kept, vocab))
            told = None if chosen is None else at(chosen)
            table.session.timed(pool_cdll().cospec_pool_sample, board.ref, vocab, place, kept, told)
        board.c.steps += 1

    table.lead(_read, advance, MixBuffersStruct(table.probs, place, vocab, kept))
    return table.drafts(q)


def _chosen(table: NativeTable, mixtures: Floats) -> array[int]:
    """``[R]``: what those that go on draw of ``mixtures [R, kept, V]``, in Python."""
    board, chosen = table.board, ints(table.board.rows)
    rows = [row for row in board.going() if board.draft_tasks[row].record.draws]
    if rows:
        step, contexts = board.c.steps, [board.draft_tasks[row].context for row in rows]
        weights = mixtures[rows, min(step, mixtures.shape[1] - 1)]
        for row, token in zip(rows, table.session.timed(draw, weights, contexts, [step] * len(rows)), strict=True):
            chosen[row] = token
    return chosen


def _read(table: NativeTable) -> None:
    """Laws, with their largest probabilities as confidences."""
    board, (others, said, places, _held) = table.board, table.readable()
    if said:
        probs = None if table.probs is None else table.probs + board.c.steps * table.stride
        pool_cdll().cospec_pool_read_distributions(board.ref, at(said), len(said) // ROWS, at(places), probs)
    for member, stand in others:
        for row, guess in zip(stand.rows, distributions(*table.asked_for(stand)), strict=True):
            if guess is not None:
                place = board.place_of(member, row)
                _note(board, place, guess)
                if guess.q is not None:
                    board.hold(place, guess.q)


COMBINERS: Sequence[Callable[[NativeTable], list[Draft]]] = (
    _unite,
    _elect,
    _fuse,
    _mix,
)  # ``Combiner.native_id`` is the place
