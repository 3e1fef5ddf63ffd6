"""Reading ``benchmarks.collaborative``: ways of decoding with several models, over the standard one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import ensembles
from benchmarks.common import DRAFTER
from benchmarks.papers.common import unclear
from benchmarks.papers.sources import Found, Source
from cospec.ensemble.speedup_model import ProposalProcess

PAIRED = "alternate_over"  # ratios of the default over other methods, of pairs; earlier runs lack them
PARTS = "ms_per_token"  # in forwards, and in all; earlier runs lack them
EQUAL = 0.995  # a ratio of counted calls that is no difference
NEAR = 0.95  # a ratio of counted calls that explains no clear loss
COLLABORATIVE = Source("collaborative", "python -m benchmarks.collaborative")
AVX2 = Source(
    "collaborative_avx2", f"{COLLABORATIVE.command} --instruction-set avx2 --name collaborative_avx2"
)  # fmt: skip
KERNELS = {COLLABORATIVE: "", AVX2: ", AVX2"}  # runs of one benchmark, and the end of the names of their rows
QUALITY = Source("quality", "python -m benchmarks.quality")
SWEEPS = Source("collaborative_sweeps", "python -m benchmarks.collaborative_sweeps")


@dataclass(frozen=True, slots=True)
class Collaborations:
    """Rows of one setting: models and how their distributions become one."""

    found: Found
    setting: str

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the members, in their order."""
        return ensembles.SETTINGS[self.setting].models

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
        rows = self.rows(temperature, batch)
        return ", ".join(f"{row['domain']} {speed(row, method)}" for row in rows)

    def over(self, other: str, temperature: float) -> str:
        """Speed of the default over another method on each domain, one request at a time.

        Raises:
            KeyError: the setting has no such method.
        """
        cells = []
        for row in self.rows(temperature, 1):
            ratio, *ends = default_over(row, other)
            cells.append(f"{row['domain']} {interval([ratio, *ends]) if ends else f'{ratio:.2f}×'}")
        return ", ".join(cells)

    def paired(self, temperature: float) -> bool:
        """Whether the run has paired ratios of the default over other methods, one request at a time."""
        return all(PAIRED in row for row in self.rows(temperature, 1))

    def theory(self, kind: str, theorem: str, temperature: float, models: int) -> str:
        """The measured speed of each domain; of two models the theorem and the count of calls with α and c of the run.

        The process takes the engine's fitted times besides. Theorem 3.6 is about models that alternate; where the
        engine chose one proposer, it is left out, and the count too. For ``naive`` the count is the theorem.
        """
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "theory" in row):
            said = row["theory"]
            applies = models == 2 and (kind == "naive" or said["form"] == kind)
            printed = f"theorem {said[theorem]:.2f}×, " if applies else ""
            if applies and kind == "alternate":
                printed += f"count {count_of_calls(said):.2f}×, "
            process, measured = said[f"{kind} process"], said[f"{kind} measured"]
            cells.append(f"{row['domain']} {measured:.2f}× ({printed}process {process:.2f}×)")
        return ", ".join(cells)

    def acceptance(self, temperature: float) -> str:
        """The engine's estimate for each model that proposed, at the end of a domain, one request at a time."""
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "theory" in row):
            members = zip(self.models, row["theory"]["alpha"], row["theory"]["gammas"], strict=True)
            each = (f"{name} {f'{alpha:.2f}' if gamma else 'none'}" for name, alpha, gamma in members)
            cells.append(f"{row['domain']} {', '.join(each)}")
        return "; ".join(cells)

    def one_sided(self, temperature: float) -> list[str]:
        """The domains at whose end the engine did not choose to alternate, one request at a time."""
        rows = [row for row in self.rows(temperature, 1) if "theory" in row]
        return [row["domain"] for row in rows if row["theory"]["form"] != "alternate"]

    def chosen(self, temperature: float, batch: int) -> str:
        """The engine's choice at the end of each domain; empty where it is not stored."""
        rows = [row for row in self.rows(temperature, batch) if "theory" in row]
        ways = dict.fromkeys(proposals(row["theory"], self.models) for row in rows)
        return f"the engine's choice at the end of a domain: {'; or '.join(ways)}" if ways else ""

    def calls(self, method: str, temperature: float) -> str:
        """Calls of all models for a committed token, and of each model.

        Raises:
            KeyError: the setting has no such method.
        """
        cells = []
        for row in (row for row in self.rows(temperature, 1) if "calls_per_token" in row):
            counts = row["calls_per_token"][method]
            each = " + ".join(f"{counts[name]:.2f} {name}" for name in (*self.models, DRAFTER) if name in counts)
            cells.append(f"{row['domain']} {sum(counts.values()):.2f} = {each}")
        return ", ".join(cells)

    def cost(self, method: str, temperature: float, models: int, batch: int = 1) -> dict[str, float]:
        """Time of the calls for a token of each domain, in calls of a large model.

        Args:
            method: ``standard`` calls each model for each token.
            models: how many of the models, from the first on, are large; the other one costs what was measured.

        Raises:
            KeyError: the setting has no such method.
        """
        found = {}
        for row in (row for row in self.rows(temperature, batch) if "calls_per_token" in row):
            each = row["calls_per_token"]
            calls = [1.0 if method == "standard" else each[method].get(name, 0.0) for name in self.models]
            c, proposer = row["theory"]["c"], row["theory"]["proposer"]
            small = c if proposer >= models else 1.0 / c
            drafter = each[method].get(DRAFTER, 0.0) if method in each else 0.0  # a model as the last member
            total = sum(calls[:models]) + small * sum(calls[models:])
            found[row["domain"]] = total + drafter * (small if models < len(self.models) else 1.0)
        return found

    def loss(self, other: str, temperature: float, models: int, batch: int = 1) -> str:
        """Sentences on why the default is slower than another method over all domains; empty where it is not slower.

        Args:
            models: how many of the models, from the first on, are large.
            batch: requests at once; with several, only clear losses have a sentence.

        Raises:
            KeyError: the setting has no such method.
        """
        rows = {row["domain"]: row for row in self.rows(temperature, batch)}
        ratio = default_over(rows["all"], other)[0]
        if ratio >= 1.0:
            return ""
        together = "" if batch == 1 else " and eight requests"
        said = f"At T = {temperature:g}{together} the default has {ratio:.2f} times the speed of *{other}*"
        if not clear(rows["all"], other):
            return f"{said}, no clear difference." if batch == 1 else ""
        if other == "plain" and not self.counts_drafts(temperature):
            return f"{said}. The calls of the drafter of *plain* were not counted, so the reason is not known."
        mine, its = (self.cost(method, temperature, models, batch) for method in ("alternate", other))
        ratios = [its[domain] / mine[domain] for domain in mine]
        measured = counted([default_over(rows[domain], other)[0] for domain in mine])
        longer = "So the number of calls is not the reason; the time of a token is"
        if batch > 1:
            longer = (
                "The count takes all calls of a model as equally long, but a call that verifies proposals of eight "
                "requests has more rows. The time of a token is"
            )
        reason = (
            longer
            if min(ratios) >= NEAR
            else "Dearer calls explain what the first figures lack to 1; where the measured figure is lower, the time "
            "of a token explains the rest"
        ) + self.token_parts(temperature, batch, other)
        return (
            f"{said}. By the calls of all models and their cost it would have {counted(ratios)} times this speed "
            f"({', '.join(mine)}); measured are {measured}. {reason}"
        )

    def token_parts(self, temperature: float, batch: int, other: str) -> str:
        """The end of a sentence: the time of a token inside and outside of forwards, against another method.

        Raises:
            KeyError: the setting has no such method.
        """
        rows = [row[PARTS] for row in self.rows(temperature, batch) if PARTS in row]
        if not rows:
            return ", which was not measured by parts."
        inside, outside = (
            [counted([part(row[method]) for row in rows]) for method in ("alternate", other)]
            for part in (lambda each: each["forwards"], lambda each: each["all"] - each["forwards"])
        )
        return (
            f": {inside[0]} ms in forwards and {outside[0]} ms outside, with *{other}* {inside[1]} and {outside[1]} ms "
            "(means; measured ratios are medians)."
        )

    def on_domains(self, other: str, temperature: float) -> str:
        """Sentences on clear losses to another method on one domain, where all domains together show none.

        Raises:
            KeyError: the setting has no such method.
        """
        rows = {row["domain"]: row for row in self.rows(temperature, 1)}
        if clear(rows["all"], other) and default_over(rows["all"], other)[0] < 1.0:
            return ""
        said = []
        for domain, row in rows.items():
            ratio, *ends = default_over(row, other)
            if domain == "all" or ratio >= 1.0 or not ends or not clear(row, other) or PARTS not in row:
                continue
            mine, its = (row[PARTS][method] for method in ("alternate", other))
            said.append(
                f"On {domain} alone, T = {temperature:g}, the default has {interval([ratio, *ends])} the speed of "
                f"*{other}*: {mine['forwards']:.2f} ms a token in forwards and {mine['all'] - mine['forwards']:.2f} "
                f"outside against {its['forwards']:.2f} and {its['all'] - its['forwards']:.2f}."
            )
        return " ".join(said)

    def outside(self, temperature: float) -> str:
        """A sentence on why the default is slower than a drafter that is no member, one request at a time, all domains.

        Empty where the default is not clearly slower.

        Raises:
            KeyError: the setting has no such method.
        """
        rows = {row["domain"]: row for row in self.rows(temperature, 1)}
        ratio, *ends = default_over(rows["all"], "outside")
        if ratio >= 1.0 or not clear(rows["all"], "outside"):
            return ""
        counted_rows = [row["calls_per_token"] for row in rows.values() if "calls_per_token" in row]
        own, its = (
            counted([sum(each[method].get(name, 0.0) for name in self.models) for each in counted_rows])
            for method in ("alternate", "outside")
        )
        drafts = counted([each["outside"][DRAFTER] for each in counted_rows])
        return (
            f"At T = {temperature:g} the default has {interval([ratio, *ends])} the speed of *outside*: it calls the "
            f"members {own} times for a token, *outside* {its} times, and its smaller drafter {drafts} times."
        )

    def counts_drafts(self, temperature: float) -> bool:
        """Whether the run counted the calls of *plain*'s drafter."""
        return all(DRAFTER in row["calls_per_token"]["plain"] for row in self.rows(temperature, 1) if "theory" in row)

    def slower_together(self, temperature: float, models: int) -> str:
        """Why the default is slower than standard decoding with eight requests, over all domains; empty where not.

        Args:
            models: how many of the models, from the first on, are large.
        """
        rows = {row["domain"]: row["over_standard"]["alternate"] for row in self.rows(temperature, 8)}
        middle, low, high = rows["all"]
        if middle >= 1.0:
            return ""
        said = (
            f"With eight requests at T = {temperature:g} the default has {middle:.2f} times the speed of standard "
            f"decoding ({bound(low)} to {bound(high)}{unclear(low, high)})."
        )
        if high >= 1.0:
            return said
        mine, standard = (self.cost(name, temperature, models, 8) for name in ("alternate", "standard"))
        ratios = [standard[domain] / mine[domain] for domain in mine]
        parts = self.token_parts(temperature, 8, "standard")
        reason = {
            max(ratios) < EQUAL: "So the choice of the proposer or the lengths loses.",
            min(ratios) >= EQUAL: f"So fewer calls do not pay, and the time of a token loses{parts}",
        }.get(True, f"So lengths lose in some domains, and the time of a token in others{parts}")
        return (
            f"{said} By the calls and their cost it would have {counted(ratios)} ({', '.join(mine)}); measured are "
            f"{counted([rows[domain][0] for domain in mine])}. {reason}"
        )

    def least(self, batch: int) -> tuple[float, ...]:
        """The default's least speed over standard decoding, all domains, over the temperatures, and its interval."""
        rows = self.found["settings"][self.setting]
        return min(
            tuple(row["over_standard"]["alternate"]) for row in rows if (row["batch"], row["domain"]) == (batch, "all")
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


def default_over(row: Found, other: str) -> tuple[float, ...]:
    """The default's speed over another method: the paired ratio with its interval where stored, else a quotient.

    Raises:
        KeyError: the setting has no such method.
    """
    if PAIRED in row:
        return tuple(row[PAIRED][other])
    own, base = (row["over_standard"][name][0] for name in ("alternate", other))
    return (own / base,)


def clear(row: Found, other: str) -> bool:
    """Whether the default and another method differ: by their paired ratio where stored, else by both intervals."""
    if PAIRED in row:
        _, low, high = row[PAIRED][other]
        return not low <= 1.0 <= high
    own, base = (row["over_standard"][name] for name in ("alternate", other))
    return apart(own, base)


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether neither of two figures lies in the other's interval."""
    return not (one[1] <= other[0] <= one[2] or other[1] <= one[0] <= other[2])


def proposals(theory: Found, names: Sequence[str]) -> str:
    """Who proposes how many tokens."""
    gammas = theory["gammas"]
    if theory["form"] == "naive":
        length = gammas[theory["proposer"]]
        return f"one proposer, {names[theory['proposer']]}, of {length} token{'s' if length > 1 else ''}"
    return f"to alternate, lengths {', '.join(map(str, gammas))}" if theory["form"] == "alternate" else "no proposals"


def count_of_calls(theory: Found) -> float:
    """The speed over standard decoding of two models by the count of calls, with α, lengths and c of the run."""
    first, c = theory["proposer"], theory["c"]
    costs = [1.0, 1.0]
    costs[first] = c
    alphas, gammas = tuple(theory["alpha"]), tuple(theory["gammas"])
    return ProposalProcess(alphas, gammas, default=first).factor(costs)


def speed(row: Found, method: str) -> str:
    """A speed over standard decoding with its interval; of two groups of a domain's requests with both figures."""
    figures = row["over_standard"][method]
    if row["batch"] > 1 and row["domain"] != "all":
        return "{:.2f}× [{:.2f} and {:.2f}]".format(*figures)
    return interval(figures)


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
    middle, low, high = figures
    return f"{middle:.2f}× ({bound(low)} to {bound(high)})"


def bound(value: float) -> str:
    """An end of an interval; a third digit shows on which side of 1 it lies."""
    return f"{value:.3f}" if f"{value:.2f}" == "1.00" and value != 1.0 else f"{value:.2f}"
