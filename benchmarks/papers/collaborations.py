"""Reading ``benchmarks.collaborative``: ways of decoding with several models, over the standard one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.sources import Found, Source

COLLABORATIVE = Source("collaborative", "python -m benchmarks.collaborative")
AVX2 = Source("collaborative_avx2", "python -m benchmarks.collaborative --name collaborative_avx2")
QUALITY = Source("quality", "python -m benchmarks.quality")
SWEEPS = Source("collaborative_sweeps", "python -m benchmarks.collaborative_sweeps")


@dataclass(frozen=True, slots=True)
class Collaborations:
    """Rows of one setting: models and how their distributions become one."""

    found: Found
    setting: str

    def rows(self, temperature: float, batch: int) -> list[Found]:
        """By domain.

        Raises:
            KeyError: it was not measured.
        """
        every = self.found["settings"][self.setting]
        rows = [row for row in every if (row["temperature"], row["batch"]) == (temperature, batch)]
        if not rows:
            raise KeyError((temperature, batch))
        return rows

    def over_standard(self, method: str, temperature: float, batch: int) -> str:
        """Speed of a method on each domain.

        Raises:
            KeyError: the setting has no such method.
        """
        cells = [f"{row['domain']} {interval(row['over_standard'][method])}" for row in self.rows(temperature, batch)]
        return ", ".join(cells)

    def over(self, method: str, other: str, temperature: float) -> str:
        """Speed of a method over another on each domain, one request at a time.

        Raises:
            KeyError: the setting has no such method.
        """
        cells = []
        for row in self.rows(temperature, 1):
            own, base = (row["over_standard"][name][0] for name in (method, other))
            cells.append(f"{row['domain']} {own / base:.2f}×")
        return ", ".join(cells)

    def theory(self, kind: str, theorem: str, temperature: float, models: int) -> str:
        """The measured speed of each domain; the theorem of two models and the counted calls with measured α and c.

        Theorem 3.6 is about models that alternate; where the engine chose one proposer, it is left out.
        """
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "theory" in row):
            said = row["theory"]
            applies = models == 2 and (kind == "naive" or said["form"] == kind)
            printed = f"theorem {said[theorem]:.2f}×, " if applies else ""
            process, measured = said[f"{kind} process"], said[f"{kind} measured"]
            cells.append(f"{row['domain']} {measured:.2f}× ({printed}process {process:.2f}×)")
        return ", ".join(cells)

    def acceptance(self, temperature: float) -> str:
        """The acceptance rate of the proposals of each model that proposed, one request at a time."""
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "theory" in row):
            pairs = zip(row["theory"]["alpha"], row["theory"]["gammas"], strict=True)
            cells.append(f"{row['domain']} {', '.join(f'{alpha:.2f}' if gamma else 'none' for alpha, gamma in pairs)}")
        return "; ".join(cells)

    def alternates(self, temperature: float) -> bool:
        """Whether the engine chose to alternate on every domain, one request at a time."""
        return all(row["theory"]["form"] == "alternate" for row in self.rows(temperature, 1) if "theory" in row)

    def chosen(self, temperature: float, batch: int) -> str:
        """What the engine chose to propose by default, over all domains; empty where it is not stored."""
        rows = [row["theory"] for row in self.rows(temperature, batch) if "theory" in row]
        ways = dict.fromkeys(proposals(each) for each in rows)
        return f"the engine chose {'; or '.join(ways)}" if ways else ""

    def calls(self, method: str, temperature: float) -> str:
        """Calls of all models for a committed token, and of each model.

        Raises:
            KeyError: the setting has no such method.
        """
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "calls_per_token" in row):
            models = row["calls_per_token"][method]
            each = " + ".join(f"{calls:.2f} {name}" for name, calls in models.items())
            cells.append(f"{row['domain']} {sum(models.values()):.2f} = {each}")
        return ", ".join(cells)

    def cost(self, method: str, temperature: float, models: int) -> dict[str, float]:
        """Time of the calls for a token of each domain, in calls of a large model.

        Args:
            models: how many of the models, from the first on, are large; the other one costs what was measured.

        Raises:
            KeyError: the setting has no such method.
        """
        found = {}
        for row in (row for row in self.rows(temperature, 1) if "calls_per_token" in row):
            calls = list(row["calls_per_token"][method].values())
            c, proposer = row["theory"]["c"], row["theory"]["proposer"]
            small = c if proposer >= models else 1.0 / c
            found[row["domain"]] = sum(calls[:models]) + small * sum(calls[models:])
        return found

    def loss(self, other: str, temperature: float, models: int) -> str:
        """Sentences on why the default is slower than another method over all domains; empty where it is not slower.

        Args:
            models: how many of the models, from the first on, are large.

        Raises:
            KeyError: the setting has no such method.
        """
        rows = {row["domain"]: row["over_standard"] for row in self.rows(temperature, 1)}
        own, base = rows["all"]["alternate"], rows["all"][other]
        if own[0] >= base[0]:
            return ""
        said = f"At T = {temperature:g} the default has {own[0] / base[0]:.2f} times the speed of *{other}*"
        if base[1] <= own[0] or base[0] <= own[2]:
            return f"{said}, no clear difference."
        if other == "plain":
            return f"{said}. The calls of the drafter of *plain* were not counted, so the reason is not known."
        mine, its = (self.cost(method, temperature, models) for method in ("alternate", other))
        by_calls = counted([its[domain] / mine[domain] for domain in mine])
        measured = counted([rows[domain]["alternate"][0] / rows[domain][other][0] for domain in mine])
        return (
            f"{said}. By the calls of all models and their cost it would have {by_calls} times this speed "
            f"({', '.join(mine)}); measured are {measured}. Worse lengths explain what the first figures lack to 1, "
            "and the time of a step the rest, which was not measured by parts."
        )

    def slower_together(self, temperature: float) -> str:
        """A sentence on the domains where the default is clearly slower than standard decoding with eight requests."""
        slower = [row["domain"] for row in self.rows(temperature, 8) if row["over_standard"]["alternate"][2] < 1]
        if not slower:
            return ""
        return (
            f"With eight requests at T = {temperature:g} the default is slower than standard decoding "
            f"({', '.join(slower)}); the reason was not measured."
        )

    def raw(self, method: str, temperature: float) -> str:
        """Tokens per second on each domain, one request at a time."""
        rows = self.rows(temperature, 1)
        return ", ".join(f"{row['domain']} {row['tokens_per_second'][method]:.0f}" for row in rows)

    def sweep(self, value: str) -> str:
        """Speed at each point, and its interval.

        Raises:
            KeyError: it was not swept.
        """
        points = self.found["sweeps"][self.setting][value]
        return ", ".join(f"{point}: {interval(speed)}" for point, speed in points.items())


def proposals(theory: Found) -> str:
    """Who proposes how many tokens."""
    gammas = theory["gammas"]
    if theory["form"] == "naive":
        return f"one proposer of {gammas[theory['proposer']]} tokens, so nothing alternates"
    return f"to alternate, lengths {', '.join(map(str, gammas))}" if theory["form"] == "alternate" else "no proposals"


def counted(calls: Sequence[float]) -> str:
    """Several numbers in words."""
    cells = [f"{each:.2f}" for each in calls]
    return f"{', '.join(cells[:-1])} and {cells[-1]}"


def quality(found: Found, models: str, option: str, domain: str) -> str:
    """Nats per token of reference answers at each value of an option.

    Raises:
        KeyError: it was not measured.
    """
    rows = [row for row in found["rows"] if (row["models"], row["option"], row["domain"]) == (models, option, domain)]
    if not rows:
        raise KeyError(domain)
    return ", ".join("{:g}: {:.3f} ({:.3f} to {:.3f})".format(row["value"], *row["nats"]) for row in rows)


def interval(figures: Sequence[Any]) -> str:
    """A ratio and its interval."""
    return "{:.2f}× ({:.2f} to {:.2f})".format(*figures)
