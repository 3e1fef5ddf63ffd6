"""A pool's own work in the native library, one call for all sequences: the same bits as ``readable``.

What is read from logits is read there too, where rows are plain: neither edited nor truncated. Board and library are
in ``board`` and ``csrc/spec/pool_batch.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from torch import Tensor

from cospec import native
from cospec.drafters.combiners.job import Guess
from cospec.drafters.combiners.reading import distributions, draw, guesses
from cospec.drafters.combiners.session import Session, Stand
from cospec.drafters.looking import reads_natively
from cospec.drafters.pool import led
from cospec.drafters.pool.board import Board, Shelf, at, ints, library
from cospec.drafters.pool.readable import Staff
from cospec.drafters.pool.record import Given, Knowledge, Record, Seat
from cospec.drafters.routing.everyone import Everyone
from cospec.draws import Floats
from cospec.native_structs import DrafterLogits, MixBuffers, words
from cospec.types import Commit, Context, Draft

MOST_MEMBERS = 64  # who is able stands in the bits of a word
ROWS = words(DrafterLogits)


class Compiled:
    """See ``record.Work``. It knows the combiners and routings of this package; ``can`` tells."""

    def __init__(self, staff: Staff, knowledge: Knowledge) -> None:
        self.staff, self.knowledge = staff, knowledge
        assert staff.combiner.native_id is not None, "``can`` was not asked"
        self._make = COMBINERS[staff.combiner.native_id]
        self._routing = Everyone.native_id if staff.allots else staff.routing.native_id
        self._board: Board | None = None
        self._shelf = Shelf(knowledge)
        self._novelty: int | None = native.address(knowledge.novelty) if staff.allots else None
        self._silent = sum([1 << member for member in staff.silent])
        self._asked: list[list[int]] = []

    @staticmethod
    def can(staff: Staff) -> bool:
        """Whether the library is there and has what the pool does."""
        known = staff.combiner.native_id is not None and staff.routing.native_id is not None
        return native.available() and known and len(staff.names) <= MOST_MEMBERS

    def choose(self, seats: Seq[Seat]) -> list[list[int]]:
        """See ``record.Work``."""
        staff = self.staff
        board = self._board = Board(seats, self._shelf, staff.combiner.steps)
        to, novelty = board.space.asked_at, self._novelty
        library().cospec_pool_route(board.ref, staff.free, self._silent, self._routing, novelty, to)
        self._asked = board.asked()
        return self._asked

    def combine(self, seats: Seq[Seat], given: Seq[Given], session: Session) -> list[Draft]:
        """See ``record.Work``."""
        board = self._board
        assert board is not None and board.seats is seats, "combined before it was chosen who takes part"
        self._board = None
        board.give(given)
        for row, seat in enumerate(seats):
            seat.record.said = board, row
        found: list[Draft] = self._make(Table(board, session, self.staff, self._asked, self._novelty))
        return found

    def learn(self, commits: Seq[tuple[Record, Commit]]) -> None:
        """See ``record.Work``."""
        boards: dict[Board, list[int]] = {}  # several where drafts of several rounds come to be
        for record, commit in commits:
            (board, row), record.said = record.said, None
            words = boards.get(board)
            if words is None:
                words = boards[board] = []
            words += (row, len(commit.path), len(commit.tokens))
            words += commit.tokens
        for board, words in boards.items():
            told = array("q", words)
            library().cospec_pool_feedback(board.ref, at(told), len(told), self.staff.routing.learns)


@dataclass(slots=True)
class Table:
    """What one combiner works at."""

    board: Board
    session: Session
    staff: Staff
    asked: Seq[Seq[int]]  # ``[M][R]``, as chosen
    novelty: int | None  # where ``Knowledge.novelty`` is, for those that learn it
    taking: Mapping[int, list[int]] = field(default_factory=dict)  # the sequences that each drafter is led along
    plain: bool = False  # no row is edited or truncated
    native: bool = True  # the library has read all rows, of the latest position
    laws: int | None = None  # where there is room for distributions
    stride: int = 0  # bytes from those of one position to the next; 0 where they need not be kept

    def drafts(self, q: Floats | None = None) -> list[Draft]:
        """What is on the board."""
        return self.board.drafts(self.staff.names, self.staff.combiner.branches, q)

    def open(self) -> None:
        """Who is led along which sequences, and whether the library can read what they say."""
        self.plain = all([seat.record.plain for seat in self.board.seats])
        rows = range(self.board.rows)
        taking = {member: list(compress(rows, self.asked[member])) for member in sorted(self.staff.led)}
        self.taking = {member: own for member, own in taking.items() if own}

    def lead(
        self, read: Callable[[Table], None], advance: Callable[[], object], mixing: MixBuffers | None = None
    ) -> None:
        """Those that take part, until no spine is going; ``read`` writes down what everybody says who is led.

        ``mixing`` is for the library, which knows what to read and how to advance.
        """
        if self.plain and led.lead(self.board, self.session, self.taking, mixing):
            return
        seats = self.board.seats
        contexts, depths = [seat.context for seat in seats], [min(b.depth, b.max_nodes) for _, b, *_ in seats]
        self.session.open(contexts, depths, self.taking)
        while True:
            self.session.timed(read, self)
            advance()
            fed = self.board.fed()
            if not fed:
                return
            self.session.feed(fed)

    def readable(self) -> tuple[list[tuple[int, Stand]], array[int], array[int], list[Tensor]]:
        """Who has to be read in Python; of the others ``DrafterLogits`` of ``csrc/spec/pool_batch.h``, the sequences of
        their rows, and what has to be kept while that is read."""
        others, words, places, held = list[tuple[int, Stand]](), list[int](), list[int](), list[Tensor]()
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

    def asked_for(self, stand: Stand) -> tuple[Tensor, list[Context], list[list[int]]]:
        """Logits, contexts and paths of one drafter's rows."""
        board, (rows, _, logits) = self.board, stand
        return logits, [board.seats[row].context for row in rows], [board.path(row) for row in rows]


def _unite(table: Table) -> list[Draft]:
    library().cospec_pool_union(table.board.ref, table.novelty)
    return table.drafts()


def _elect(table: Table) -> list[Draft]:
    library().cospec_pool_vote(table.board.ref)
    return table.drafts()


def _fuse(table: Table) -> list[Draft]:
    board = table.board

    def advance() -> None:
        board.c.steps += 1
        library().cospec_pool_fuse(board.ref)

    table.open()
    table.lead(_hear, advance)
    return table.drafts()


def _hear(table: Table) -> None:
    """Tokens and confidences."""
    board, (others, said, places, _held) = table.board, table.readable()
    if said:
        library().cospec_pool_read_candidates(board.ref, at(said), len(said) // ROWS, at(places))
    for member, stand in others:
        for row, guess in zip(stand.rows, guesses(*table.asked_for(stand)), strict=True):
            if guess is not None:
                _note(board, board.place_of(member, row), guess)


def _note(board: Board, place: int, guess: Guess) -> None:
    """What the library writes of rows that it reads."""
    space = board.space
    tokens, chances = space.guessed + 2 * place, space.chances + 2 * place
    space.ints[tokens], space.floats[chances] = guess.token, guess.confidence
    if guess.second is not None:
        space.ints[tokens + 1], space.floats[chances + 1] = guess.second


def _mix(table: Table) -> list[Draft]:
    board, vocab, records = table.board, table.session.vocab_size, [seat.record for seat in table.board.seats]
    table.open()
    mixtures, place, kept, q = None, None, 1, None
    if any([record.draws for record in records]):
        own = any([record.keeps for record in records])
        kept = board.depth if own else 1
        said = vocab * sum([len(rows) for rows in table.taking.values()])
        if own:  # handed on with the drafts, which may outlive the board
            mixtures = q = np.empty((board.rows, kept, vocab))
            place, table.stride = native.address(q), 8 * said
        else:
            mixtures, place = board.space.large("mixtures", board.rows * vocab)
        table.laws = board.space.large("laws", said * kept)[1]

    def advance() -> None:
        library().cospec_pool_mix(board.ref, vocab, place, kept)
        if mixtures is not None:
            chosen = None if table.native else _chosen(table, mixtures.reshape(-1, kept, vocab))
            told = None if chosen is None else at(chosen)
            table.session.timed(library().cospec_pool_sample, board.ref, vocab, place, kept, told)
        board.c.steps += 1

    table.lead(_read, advance, MixBuffers(table.laws, place, vocab, kept))
    return table.drafts(q)


def _chosen(table: Table, mixtures: Floats) -> array[int]:
    """``[R]``: what those that go on draw of ``mixtures [R, kept, V]``, in Python."""
    board, chosen = table.board, ints(table.board.rows)
    rows = [row for row in board.going() if board.seats[row].record.draws]
    if rows:
        step, contexts = board.c.steps, [board.seats[row].context for row in rows]
        weights = mixtures[rows, min(step, mixtures.shape[1] - 1)]
        for row, token in zip(rows, table.session.timed(draw, weights, contexts, [step] * len(rows)), strict=True):
            chosen[row] = token
    return chosen


def _read(table: Table) -> None:
    """Laws, with their largest probabilities as confidences."""
    board, (others, said, places, _held) = table.board, table.readable()
    if said:
        laws = None if table.laws is None else table.laws + board.c.steps * table.stride
        library().cospec_pool_read_distributions(board.ref, at(said), len(said) // ROWS, at(places), laws)
    for member, stand in others:
        for row, guess in zip(stand.rows, distributions(*table.asked_for(stand)), strict=True):
            if guess is not None:
                place = board.place_of(member, row)
                _note(board, place, guess)
                if guess.q is not None:
                    board.hold(place, guess.q)


COMBINERS: Seq[Callable[[Table], list[Draft]]] = (_unite, _elect, _fuse, _mix)  # ``Combiner.native_id`` is the place
