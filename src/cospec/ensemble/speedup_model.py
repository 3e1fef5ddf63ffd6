"""Predicted speed-up of collaborative decoding by exact counts of model calls (CoS 3.2 to 3.4).

``alpha`` is the acceptance rate of a proposed token, ``gamma`` the length of a proposal. ``c`` is the ratio of a
proposer's time per call to the scorer's. Factors are relative to standard collaborative decoding, which calls each
model for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# proposers of the pending tokens; number of positions that each model has scored
State = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One possible result of a turn: probability, tokens gained, calls of each model, next state."""

    probability: float
    tokens: int
    calls: tuple[int, ...]
    next_state: State
    model: int
    rows: int  # tokens in the first of the calls


@dataclass(frozen=True)
class ProposalProcess:
    """The steps of one sequence as a Markov chain; tokens are accepted independently of one another.

    Attributes:
        alphas: acceptance rate per proposer.
        gammas: proposal length per proposer.
        default: the model that proposes after a rejection.
        alternate: whether scorers propose as well (CoS 3.3).
        members: the models that the blend reads; other models only propose.
        relaxed: the blend is a target that is relaxed towards the proposer, which scores its last accepted token; a
            bonus token follows. Requires ``alternate`` False.
    """

    alphas: tuple[float, ...]
    gammas: tuple[int, ...]
    default: int = 0
    alternate: bool = True
    members: tuple[int, ...] = ()
    relaxed: bool = False

    def calls_per_token(self) -> tuple[float, ...]:
        """Return the calls of each model per token, in the long run."""
        return tuple(self._per_token(lambda turn: turn.calls).tolist())

    def seconds_per_token(self, price: Callable[[int, int, int], float]) -> float:
        """Return the seconds per token, in the long run.

        ``price(model, rows, passes)`` is the time of a turn: one call over ``rows``, then calls over one row each.
        """
        found = self._per_token(lambda turn: (price(turn.model, turn.rows, turn.calls[turn.model]),))
        return float(found[0])

    def _per_token(self, value: Callable[[_Turn], Sequence[float]]) -> Floats:
        """Return the sums of ``value(turn)`` per token, in the long run."""
        states, turns = self._explore()
        n = len(states)
        moves, tokens, values = np.zeros((n, n)), np.zeros(n), [np.zeros(0)] * n
        for state, place in states.items():
            each = [(turn.probability, turn) for turn in turns[state]]
            for probability, turn in each:
                moves[place, states[turn.next_state]] += probability
                tokens[place] += probability * turn.tokens
            values[place] = np.sum([probability * np.array(value(turn)) for probability, turn in each], axis=0)
        # the stationary distribution: pi (P - I) = 0 with pi summing to one
        system = np.vstack([moves.T - np.eye(n), np.ones(n)])
        share = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)[0]
        return np.asarray(share @ np.array(values) / (share @ tokens))

    def factor(self, costs: Sequence[float]) -> float:
        """Return the speed-up when a call of each model takes ``costs``."""
        standard = sum(costs[member] for member in self.members or range(len(costs)))
        return standard / sum(count * cost for count, cost in zip(self.calls_per_token(), costs, strict=True))

    def _explore(self) -> tuple[dict[State, int], dict[State, list[_Turn]]]:
        """Number every state that is reachable from the start, and list its turns."""
        start: State = ((), (0,) * len(self.alphas))
        states, turns, waiting = {start: 0}, {}, [start]
        while waiting:
            state = waiting.pop()
            turns[state] = self._turns(*state)
            for turn in turns[state]:
                if turn.next_state not in states:
                    states[turn.next_state] = len(states)
                    waiting.append(turn.next_state)
        return states, turns

    def _turns(self, proposers: tuple[int, ...], scored: tuple[int, ...]) -> list[_Turn]:
        """Return the possible results of one turn, by the number of accepted proposals."""
        start: State = ((), (0,) * len(self.alphas))
        if not proposers and any(scored):
            last_token = tuple(int(m == self.default) for m in range(len(scored)))
            return [_Turn(1.0, 1, last_token, start, self.default, 1)]
        if not proposers:
            return [self._proposal_turn(1.0, 0, start, (self.default, 1))]
        members = self.members or tuple(range(len(self.alphas)))
        model = min(members, key=lambda m: (scored[m], (m - self.default) % len(scored)))
        feeds_last = self.alternate or self.relaxed or proposers[-1] not in members  # the last token is fed too
        counts = [len(proposers) + feeds_last if m == model else count for m, count in enumerate(scored)]
        known = min(counts[m] for m in members)
        verified = min(known, len(proposers))
        one_call, rows = tuple(int(m == model) for m in range(len(scored))), counts[model] - scored[model]
        found, kept = [], 1.0
        for length in range(verified):
            alpha = self.alphas[proposers[length]]
            found.append(_Turn(kept * (1 - alpha), length + 1, one_call, start, model, rows))
            kept *= alpha
        next_state: State = (proposers[verified:], tuple(max(0, count - verified) for count in counts))
        if known > len(proposers):  # the distribution after the last token is known too: a bonus
            found.append(_Turn(kept, verified + 1, one_call, start, model, rows))
        elif self.alternate:
            found.append(self._proposal_turn(kept, verified, next_state, (model, rows)))
        else:
            found.append(_Turn(kept, verified, one_call, next_state, model, rows))
        return [turn for turn in found if turn.probability > 0]

    def _proposal_turn(self, probability: float, tokens: int, state: State, turn: tuple[int, int]) -> _Turn:
        """Return the turn in which the model proposes.

        One call over ``rows`` feeds the model its unseen tokens and gives its first proposal.
        """
        model, rows = turn
        gamma = self.gammas[model]
        proposers = state[0] + (model,) * gamma
        scored = tuple(len(proposers) if m == model else count for m, count in enumerate(state[1]))
        calls = tuple(gamma * (m == model) for m in range(len(scored)))
        return _Turn(probability, tokens, calls, (proposers, scored), model, rows)
