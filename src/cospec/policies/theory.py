"""What collaborative decoding should gain: CoS's theorems, and the exact count of model calls (CoS 3.2 to 3.4).

``alpha`` is the chance that a proposed token is accepted, ``gamma`` the length of a proposal, ``c`` a proposer's time
for one call over the scorer's. Factors are over standard collaborative decoding, which asks each model for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

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


def acceptance_bound(weights: Seq[float], author: int) -> float:
    """CoS theorem 3.2: a proposal of this model is accepted at least with its own weight in a weighted blend."""
    return weights[author]


@dataclass(frozen=True)
class Process:
    """The rounds of one sequence as a Markov chain, when tokens are accepted independently of one another.

    Attributes:
        alphas: per author.
        gammas: per author.
        alternate: whether scorers propose; the naive form otherwise.
        members: the models that the law reads; the others only propose.
    """

    alphas: tuple[float, ...]
    gammas: tuple[int, ...]
    default: int = 0
    alternate: bool = True
    members: tuple[int, ...] = ()

    @property
    def _members(self) -> tuple[int, ...]:
        return self.members or tuple(range(len(self.alphas)))

    def calls_per_token(self) -> tuple[float, ...]:
        """Calls of each model for one token, in the long run."""
        states, steps = self._explore()
        n = len(states)
        moves = np.zeros((n, n))
        tokens, calls = np.zeros(n), np.zeros((n, len(self.alphas)))
        for state, place in states.items():
            made, outcomes = steps[state]
            calls[place] = made
            for probability, gained, after in outcomes:
                moves[place, states[after]] += probability
                tokens[place] += probability * gained
        # the stationary distribution: pi (P - I) = 0 with pi summing to one
        system = np.vstack([moves.T - np.eye(n), np.ones(n)])
        share = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)[0]
        return tuple((share @ calls / (share @ tokens)).tolist())

    def factor(self, costs: Seq[float]) -> float:
        """Speed over standard collaborative decoding when a call of each model takes ``costs``."""
        standard = sum(costs[member] for member in self._members)
        return standard / sum(count * cost for count, cost in zip(self.calls_per_token(), costs, strict=True))

    def _explore(self) -> tuple[dict[State, int], Mapping[State, tuple[Seq[int], list[tuple[float, int, State]]]]]:
        start: State = ((), (0,) * len(self.alphas))
        states, steps, waiting = {start: 0}, {}, [start]
        while waiting:
            state = waiting.pop()
            steps[state] = self._step(state)
            for _, _, after in steps[state][1]:
                if after not in states:
                    states[after] = len(states)
                    waiting.append(after)
        return states, steps

    def _step(self, state: State) -> tuple[list[int], list[tuple[float, int, State]]]:
        """One visit of one model: its calls, and what may come of it as (probability, tokens gained, next state)."""
        authors, scored = list(state[0]), list(state[1])
        calls = [0] * len(self.alphas)
        if not authors:
            self._propose(self.default, self.gammas[self.default], authors, scored, calls)
            return calls, [(1.0, 0, (tuple(authors), tuple(scored)))]
        model = min(self._members, key=lambda m: (scored[m], (m - self.default) % len(scored)))
        calls[model] += 1
        looks_behind = self.alternate or authors[-1] not in self._members  # the last token is fed too
        scored[model] = len(authors) + looks_behind
        known = min(scored[m] for m in self._members)
        judged = min(known, len(authors))
        outcomes, kept = [], 1.0
        for length in range(judged):
            alpha = self.alphas[authors[length]]
            outcomes.append((kept * (1 - alpha), length + 1, ((), (0,) * len(scored))))
            kept *= alpha
        if known > len(authors):  # the law behind the last token is known too: a bonus
            outcomes.append((kept, judged + 1, ((), (0,) * len(scored))))
        else:
            authors, scored = authors[judged:], [max(0, count - judged) for count in scored]
            if self.alternate:
                authors.append(model)
                self._propose(model, self.gammas[model] - 1, authors, scored, calls)
            outcomes.append((kept, judged, (tuple(authors), tuple(scored))))
        after = [(p, gained, state) for p, gained, state in outcomes if p > 0]
        return calls, after

    @staticmethod
    def _propose(model: int, count: int, authors: list[int], scored: list[int], calls: list[int]) -> None:
        """``count`` tokens more, each behind a call."""
        for _ in range(count):
            calls[model] += 1
            scored[model] = len(authors) + 1
            authors.append(model)
