"""Reading ``benchmarks.pool``: drafters alone and together, by workload and temperature; and the models' card."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.papers.common import How
from benchmarks.papers.sources import Found, Source

POOL = Source("pool", "python -m benchmarks.pool")
CARD = Source("src/cospec/zoo/card.json", "cospec train evaluate --out runs/zoo --to src/cospec/zoo")
SIZES = replace(CARD, how=How.COMPUTED)  # counts of the models' parameters
DOMAINS, MIXED = ("code", "math", "prose"), "mixed"


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of the stored file."""

    found: Found

    @property
    def systems(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(dict.fromkeys(row["system"] for row in self.found["rows"]))

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that ran by themselves."""
        return tuple(name for name in self.systems if " " not in name)

    def at(self, system: str, workload: str = MIXED, temperature: float = 0.0) -> Found:
        """One row.

        Raises:
            KeyError: there is none.
        """
        for row in self.found["rows"]:
            if (row["system"], row["workload"], row["temperature"]) == (system, workload, temperature):
                return dict(row)
        raise KeyError(system)

    def value(self, figure: str, system: str, workload: str = MIXED, temperature: float = 0.0) -> float:
        """The middle of a figure."""
        return float(self.at(system, workload, temperature)[figure][0])

    def interval(self, figure: str, system: str, workload: str = MIXED, temperature: float = 0.0) -> str:
        """A figure and its interval."""
        return "{:.2f} ({:.2f} to {:.2f})".format(*self.at(system, workload, temperature)[figure])

    def speed(self, system: str, other: str, workload: str = MIXED) -> str:
        """Tokens per second over those of another system, as the product of acceptance and the rest of a step.

        The rest is how many steps run in a second: the time of drafting, verification and the pool's own work.
        """
        speed, tokens = (
            self.value(figure, system, workload) / self.value(figure, other, workload)
            for figure in ("tokens_per_s", "tokens_per_call")
        )
        return f"{speed:.2f}× = {tokens:.2f}× tokens per step · {speed / tokens:.2f}× steps per second"

    def step_ms(self, system: str) -> float:
        """About the milliseconds of a step, which writes ``tokens_per_call`` tokens for each request of the batch."""
        tokens, speed = (self.value(figure, system) for figure in ("tokens_per_call", "tokens_per_s"))
        return float(1e3 * self.found["options"]["batch"] * tokens / speed)

    def own_ms(self, system: str) -> float:
        """About the milliseconds of a step that the pool takes for routing, weights and combining."""
        return float(self.at(system)["own_share"] or 0.0) * self.step_ms(system)

    def step(self, system: str) -> str:
        """Milliseconds of a step and of its parts, in words."""
        parts = self.at(system)["ms_per_token"]
        scale = self.step_ms(system) / sum(parts.values())
        each = ", ".join(f"{name} {scale * part:.1f}" for name, part in parts.items() if round(scale * part, 1))
        own = self.own_ms(system)
        return f"{self.step_ms(system):.1f} ms = {each}" + (f" (the pool's own work {own:.1f})" if own else "")

    def best_single(self, workload: str = MIXED) -> str:
        """The drafter with the longest accepted drafts."""
        if not self.drafters:
            raise KeyError("drafters")
        return max(self.drafters, key=lambda name: self.value("acceptance", name, workload))


def of_all_steps(found: Found) -> str:
    """What acceptance lengths leave out: steps in which prompt lookup has no draft."""
    tokens = Pool(found).value("tokens_per_call", "copy", "code")
    return f"Acceptance lengths are over steps with a draft; over all steps *copy* has {tokens:.2f} tokens on code."
