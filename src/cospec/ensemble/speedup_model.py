"""What collaborative decoding should gain: CoS's theorems, and the exact count of model calls (CoS 3.2 to 3.4).

``alpha`` is the chance that a proposed token is accepted, ``gamma`` the length of a proposal, ``c`` a proposer's time
for one call over the scorer's. Factors are over standard collaborative decoding, which asks each model for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
State = tuple[tuple[int, ...], tuple[int, ...]]  # authors of the pending tokens; positions that each model has scored


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a proposal and its verification without a bonus (CoS eq. 12): ``(1 - a^g) / (1 - a)``."""
    return float(gamma) if alpha >= 1 else (1 - alpha**gamma) / (1 - alpha)


def naive_factor(alpha: float, gamma: int, c: float) -> float:
    """CoS theorem 3.1."""
    return expected_tokens(alpha, gamma) * (1 + c) / (1 + c * gamma)


def alternate_factor(
    alpha: float, gamma: int, c: float, scorer_gamma: int = 1, scorer_alpha: float | None = None
) -> float:
    """CoS theorem 3.6; the scorer's own proposals are accepted with ``scorer_alpha``, in the paper the same."""
    bonus = (alpha if scorer_alpha is None else scorer_alpha) ** scorer_gamma
    return expected_tokens(alpha, gamma) * (1 + c) / (1 + c * gamma - bonus * c)


def acceptance_bound(weights: Sequence[float], author: int) -> float:
    """CoS theorem 3.2: a proposal of this model is accepted at least with its own weight in a weighted blend."""
    return weights[author]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What may come of a turn: how likely, tokens gained, calls of each model, and the state behind it."""

    probability: float
    tokens: int
    calls: tuple[int, ...]
    after: State
    model: int
    rows: int  # tokens that the first of the calls is over


@dataclass(frozen=True)
class ProposalProcess:
    """The rounds of one sequence as a Markov chain, when tokens are accepted independently of one another.

    Attributes:
        alphas: per author.
        gammas: per author.
        default: who proposes behind a rejection.
        alternate: whether scorers propose; the naive form otherwise.
        members: the models that the law reads; the others only propose.
    """

    alphas: tuple[float, ...]
    gammas: tuple[int, ...]
    default: int = 0
    alternate: bool = True
    members: tuple[int, ...] = ()

    def calls_per_token(self) -> tuple[float, ...]:
        """Calls of each model for one token, in the long run."""
        return tuple(self._per_token(lambda turn: turn.calls).tolist())

    def seconds_per_token(self, price: Callable[[int, int, int], float]) -> float:
        """Where a turn of a model takes ``price(model, rows, passes)``: a call over rows, then others over one each."""
        found = self._per_token(lambda turn: (price(turn.model, turn.rows, turn.calls[turn.model]),))
        return float(found[0])

    def _per_token(self, value: Callable[[_Turn], Sequence[float]]) -> Floats:
        """What turns are worth, for one token, in the long run."""
        states, turns = self._explore()
        n = len(states)
        moves, tokens, worth = np.zeros((n, n)), np.zeros(n), [np.zeros(0)] * n
        for state, place in states.items():
            each = [(turn.probability, turn) for turn in turns[state]]
            for probability, turn in each:
                moves[place, states[turn.after]] += probability
                tokens[place] += probability * turn.tokens
            worth[place] = np.sum([probability * np.array(value(turn)) for probability, turn in each], axis=0)
        # the stationary distribution: pi (P - I) = 0 with pi summing to one
        system = np.vstack([moves.T - np.eye(n), np.ones(n)])
        share = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)[0]
        return np.asarray(share @ np.array(worth) / (share @ tokens))

    def factor(self, costs: Sequence[float]) -> float:
        """Speed over standard collaborative decoding when a call of each model takes ``costs``."""
        standard = sum(costs[member] for member in self.members or range(len(costs)))
        return standard / sum(count * cost for count, cost in zip(self.calls_per_token(), costs, strict=True))

    def _explore(self) -> tuple[dict[State, int], dict[State, list[_Turn]]]:
        """Every state that is reached from the beginning, numbered, and what may happen in it."""
        start: State = ((), (0,) * len(self.alphas))
        states, turns, waiting = {start: 0}, {}, [start]
        while waiting:
            state = waiting.pop()
            turns[state] = self._turns(*state)
            for turn in turns[state]:
                if turn.after not in states:
                    states[turn.after] = len(states)
                    waiting.append(turn.after)
        return states, turns

    def _turns(self, authors: tuple[int, ...], scored: tuple[int, ...]) -> list[_Turn]:
        """One turn of one model, by how many proposals are accepted in it."""
        start: State = ((), (0,) * len(self.alphas))
        if not authors:
            return [self._proposed(1.0, 0, start, (self.default, 1))]
        members = self.members or tuple(range(len(self.alphas)))
        model = min(members, key=lambda m: (scored[m], (m - self.default) % len(scored)))
        looks_behind = self.alternate or authors[-1] not in members  # the last token is fed too
        counts = [len(authors) + looks_behind if m == model else count for m, count in enumerate(scored)]
        known = min(counts[m] for m in members)
        judged = min(known, len(authors))
        once, rows = tuple(int(m == model) for m in range(len(scored))), counts[model] - scored[model]
        found, kept = [], 1.0
        for length in range(judged):
            alpha = self.alphas[authors[length]]
            found.append(_Turn(kept * (1 - alpha), length + 1, once, start, model, rows))
            kept *= alpha
        after: State = (authors[judged:], tuple(max(0, count - judged) for count in counts))
        if known > len(authors):  # the law behind the last token is known too: a bonus
            found.append(_Turn(kept, judged + 1, once, start, model, rows))
        elif self.alternate:
            found.append(self._proposed(kept, judged, after, (model, rows)))
        else:
            found.append(_Turn(kept, judged, once, after, model, rows))
        return [turn for turn in found if turn.probability > 0]

    def _proposed(self, probability: float, tokens: int, state: State, turn: tuple[int, int]) -> _Turn:
        """The model proposes; one call over so many rows fed it what it had not seen, and gave its first token."""
        model, rows = turn
        gamma = self.gammas[model]
        authors = state[0] + (model,) * gamma
        scored = tuple(len(authors) if m == model else count for m, count in enumerate(state[1]))
        calls = tuple(gamma * (m == model) for m in range(len(scored)))
        return _Turn(probability, tokens, calls, (authors, scored), model, rows)
