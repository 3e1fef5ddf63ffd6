"""A pool's own work in the native library, one call for all sequences: the same bits as ``readable``.

What is read from logits is read there too, where rows are plain: neither edited nor truncated. Board and library are
in ``board`` and ``csrc/together.h``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from cospec import native
from cospec.drafters.combiners.fuse import Fuse
from cospec.drafters.combiners.mix import Mix
from cospec.drafters.combiners.reading import distributions, draw, guesses
from cospec.drafters.combiners.session import Session, Stand
from cospec.drafters.combiners.union import Union
from cospec.drafters.combiners.vote import Vote
from cospec.drafters.looking import reads_natively
from cospec.drafters.pool.board import Board, Shelf, at, floats, ints, library
from cospec.drafters.pool.readable import Staff
from cospec.drafters.pool.record import Knowledge, Record, Seat
from cospec.drafters.routing.choice import Judged
from cospec.draws import Floats, Purpose
from cospec.types import Commit, Draft

MOST_MEMBERS = 64  # who is able stands in the bits of a word
PART = 4  # numbers of ``Judged`` in ``csrc/lessons.cpp``


class Compiled:
    """See ``record.Work``. It knows the combiners of this package; ``can`` tells."""

    def __init__(self, staff: Staff, knowledge: Knowledge) -> None:
        self.staff, self.knowledge = staff, knowledge
        self._make = _COMBINERS[type(staff.combiner)]
        self._board: Board | None = None
        self._shelf = Shelf()
        self._novelty: int = knowledge.novelty.ctypes.data

    @staticmethod
    def can(staff: Staff) -> bool:
        """Whether the library is there and has what the pool does."""
        return native.available() and type(staff.combiner) in _COMBINERS and len(staff.names) <= MOST_MEMBERS

    def choose(self, seats: Seq[Seat], most: Seq[int | None]) -> list[list[int]]:
        """See ``record.Work``."""
        board = self._board = Board(seats, self.knowledge)
        library().cospec_pool_weigh(board.ref)
        share = inf if self.staff.allots else self.staff.routing.share
        if share is None or (self.staff.silent and not self.staff.allots):
            for row, (seat, count, weights) in enumerate(zip(seats, most, board.weights(), strict=True)):
                board.set_weights(row, self.staff.route(seat, count, weights))
        else:
            able = array("Q", [seat.able for seat in seats])
            counts = array("q", [-1 if count is None else count for count in most])
            library().cospec_pool_choose(board.ref, at(able), self.staff.free, at(counts), share)
        board.shares = board.weights()
        if not self.staff.allots:
            return board.whole_depths()
        given, members = ints(len(seats) * self.knowledge.members), self.knowledge.members
        silent = sum([1 << member for member in self.staff.silent])
        library().cospec_pool_allot(board.ref, self.staff.free, silent, self._novelty, at(given))
        return [given[place : place + members].tolist() for place in range(0, len(given), members)]

    def combine(self, seats: Seq[Seat], given: Seq[dict[int, Draft]], session: Session) -> list[Draft]:
        """See ``record.Work``."""
        board = self._board
        assert board is not None and board.seats is seats, "combined before it was chosen who takes part"
        self._board = None
        board.give(given)
        for row, seat in enumerate(seats):
            seat.record.said = board, row
        found: list[Draft] = self._make(Table(board, session, self.staff, self._shelf))
        return found

    def learn(self, commits: Seq[tuple[Record, Commit]]) -> None:
        """See ``record.Work``."""
        boards: dict[int, list[tuple[Record, Commit]]] = {}
        for pair in commits:
            boards.setdefault(id(pair[0].said[0]), []).append(pair)
        for own in boards.values():  # several where drafts of several rounds come to be at once
            self._learn(own[0][0].said[0], own)

    def _learn(self, board: Board, commits: Seq[tuple[Record, Commit]]) -> None:
        heads, tokens = array("q"), array("q")
        for record, commit in commits:
            heads.extend((record.said[1], len(commit.tokens)))
            tokens.extend(commit.tokens)
        members = self.knowledge.members
        parts = floats(PART * members * len(commits))
        lessons = floats(2 * (board.drafted + board.c.depth * members * board.rows))
        library().cospec_pool_learn(board.ref, at(heads), len(commits), at(tokens), at(parts), at(lessons))
        if self.staff.routing.learns:
            told = list(zip(lessons[::2], lessons[1::2], strict=True))
            for number, (record, _) in enumerate(commits):
                found: dict[int, Judged] = {}
                for member in range(members):
                    place = PART * (number * members + member)
                    hits, seen, proposed, count = parts[place : place + PART]
                    if proposed:
                        found[member] = Judged(hits, int(seen), int(proposed), told[: int(count)])
                    told = told[int(count) :]
                self.staff.routing.learn(record.standing, found)


@dataclass(slots=True)
class Table:
    """What one combiner works at."""

    board: Board
    session: Session
    staff: Staff
    shelf: Shelf
    plain: bool = False  # no row is edited or truncated

    def drafts(self) -> list[Draft]:
        """What is on the board."""
        return self.board.drafts(self.staff.names)

    def open(self) -> None:
        """Begin to lead those that take part."""
        board = self.board
        board.lead()
        params = {id(seat.context.sampling): seat.context.sampling for seat in board.seats}
        self.plain = not any([p.edits_logits or (p.truncates and not p.greedy) for p in params.values()])
        taking = {led: [row for row, own in enumerate(board.shares) if own[led]] for led in sorted(self.staff.led)}
        contexts = [seat.context for seat in board.seats]
        self.session.open(contexts, board.depths, {member: rows for member, rows in taking.items() if rows})

    def hear(self, read: Callable[[int, Stand, Table], None]) -> None:
        """What everybody says who is led."""
        for member, stand in self.session.stands.items():
            self.session.timed(read, member, stand, self)

    def lead(self, read: Callable[[int, Stand, Table], None], advance: Callable[[], object]) -> None:
        """Until no spine is going."""
        while True:
            self.hear(read)
            advance()
            fed = self.board.fed()
            if not fed:
                return
            self.session.feed(fed)


def _unite(table: Table) -> list[Draft]:
    novelty = table.board.knowledge.novelty.ctypes.data if table.staff.allots else None
    library().cospec_pool_unite(table.board.ref, novelty)
    return table.drafts()


def _elect(table: Table) -> list[Draft]:
    library().cospec_pool_elect(table.board.ref)
    return table.drafts()


def _fuse(table: Table) -> list[Draft]:
    board = table.board

    def advance() -> None:
        board.c.steps += 1
        library().cospec_pool_fuse(board.ref)

    table.open()
    table.lead(_hear, advance)
    return table.drafts()


def _hear(member: int, stand: Stand, table: Table) -> None:
    """Tokens and confidences."""
    board, (rows, _, logits) = table.board, stand
    if table.plain and reads_natively(logits):
        logits, places = logits.contiguous(), array("q", rows)
        library().cospec_pool_hear(board.ref, member, logits.data_ptr(), logits.shape[1], at(places), len(rows))
        return
    found = guesses(logits, [board.seats[row].context for row in rows], [board.path(row) for row in rows])
    for row, guess in zip(rows, found, strict=True):
        if guess is not None:
            place = 2 * board.place_of(member, row)
            board.guessed[place], board.chances[place] = guess.token, guess.confidence
            if guess.second is not None:
                board.guessed[place + 1], board.chances[place + 1] = guess.second


def _mix(table: Table) -> list[Draft]:
    board, vocab, mixtures = table.board, table.session.vocab_size, list[Floats]()
    own = {row for row, seat in enumerate(board.seats) if _drawn(seat) and not _greedy(board, row)}
    table.open()
    board.mix(table.shelf)
    mixture = board.rows_of(board.rows, vocab)

    def advance() -> None:
        library().cospec_pool_mix(board.ref, vocab, mixture.ctypes.data)
        drawing = [row for row, on in enumerate(board.going()) if on and not _greedy(board, row)]
        if drawing:
            weights = mixture if len(drawing) == board.rows else mixture[drawing]
            step, contexts = board.c.steps, [board.seats[row].context for row in drawing]
            tokens = table.session.timed(draw, weights, contexts, [step] * len(drawing))
            for row, token in zip(drawing, tokens, strict=True):
                board.spine[row * board.c.depth + step] = token
        if own:
            mixtures.append(mixture.copy())
        library().cospec_pool_take(board.ref)
        board.c.steps += 1

    table.lead(_read, advance)
    drafts = table.drafts()
    rows = {board.seats[row].context.id: row for row in own}
    for number, draft in enumerate(drafts):
        row = rows.get(draft.id)
        if row is not None:
            q = np.stack([each[row] for each in mixtures[: len(draft)]])
            drafts[number] = replace(draft, q=q)
    return drafts


def _greedy(board: Board, row: int) -> bool:
    return board.seats[row].context.sampling.greedy


def _drawn(seat: Seat) -> bool:
    """Whether its tokens come from a q of their own."""
    return seat.context.noise is Purpose.DRAFT


def _read(member: int, stand: Stand, table: Table) -> None:
    """Distributions, with their largest probabilities as confidences."""
    board, (rows, _, logits) = table.board, stand
    if table.plain and reads_natively(logits):
        logits, places, q = logits.contiguous(), array("q", rows), board.rows_of(*logits.shape)
        count, vocab = logits.shape
        library().cospec_pool_read(
            board.ref, member, logits.data_ptr(), vocab, at(places), count, q.ctypes.data
        )  # fmt: skip
        return
    found = distributions(logits, [board.seats[row].context for row in rows], [board.path(row) for row in rows])
    for row, guess in zip(rows, found, strict=True):
        if guess is not None:
            assert guess.q is not None, "a distribution"
            place, own = board.place_of(member, row), board.rows_of(1, len(guess.q))
            own[0] = guess.q
            board.laws[place], board.chances[2 * place] = own.ctypes.data, guess.confidence


_COMBINERS: Mapping[type, Callable[[Table], list[Draft]]] = {Union: _unite, Vote: _elect, Fuse: _fuse, Mix: _mix}
