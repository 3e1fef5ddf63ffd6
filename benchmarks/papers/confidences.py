"""Reading ``benchmarks.confidences``: acceptance by a draft token's probability, and by length of the drafts."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.common import PLOT, Section
from benchmarks.papers.pools import DOMAINS
from benchmarks.papers.sources import Found, Results, Source

CONFIDENCES = Source("confidences", "python -m benchmarks.confidences")
TEMPERATURES = (0.0, 0.8)
DRAFTERS = ("generic", *DOMAINS)
LENGTHS = (1, 2, 4, 6, 8, 12)
TOP_OVER_ALL = {
    "Acceptance of judged tokens": "top_over_all",
    "Accepted over drafted tokens": "top_over_all_drafted",
}
PAPERS_RATIO = 1.8
INTERVAL = "{value:.2f} ({low:.2f} to {high:.2f})"
CHAINS = "Drafts are chains, verified by `rejection`, on 48 prompts of each domain."
JUDGED = "A token is judged if all tokens before were accepted."
SETTING = (
    f"{CHAINS} Confidence is the drafter's probability of the proposed token: of greedy tokens at temperature 1, of "
    f"sampled tokens as drawn. {JUDGED}"
)


def by_probability(results: Results) -> Section:
    """CoSine, figure 3(b)."""
    rows = []
    for temperature in TEMPERATURES:
        at = f"temperature {temperature:g}"
        figures: tuple[tuple[str, str, Callable[[Found], str]], ...] = (
            ("Acceptance of judged tokens by tenth of confidence, lowest first", PLOT, tenths),
            ("Acceptance of judged tokens in the top tenth", "", top_tenth),
        )
        rows += [
            results.row(
                f"{what}, generic, {at}",
                paper,
                CONFIDENCES,
                lambda found, pick=pick, temperature=temperature: pick(row_of(found, "generic", temperature)),
            )
            for what, paper, pick in figures
        ]
        rows += [
            results.row(
                f"{what}, the top tenth over all, {name}, {at}",
                "1.8 (80% higher)",
                CONFIDENCES,
                lambda found, figure=figure, name=name, temperature=temperature: top_over_all(
                    row_of(found, name, temperature), figure
                ),
            )
            for what, figure in TOP_OVER_ALL.items()
            for name in DRAFTERS
        ]
        rows.append(
            results.row(
                f"The top tenth over all judged tokens, positions 1 to 4 of the draft, generic, {at}",
                "by position, without numbers",
                CONFIDENCES,
                lambda found, temperature=temperature: ", ".join(
                    times(each["top_over_all"]) for each in row_of(found, "generic", temperature)["positions"]
                ),
            )
        )
    return Section(
        "Figure 3(b): acceptance by probability and position",
        tuple(rows),
        f"{SETTING} Drafts have four tokens. The paper does not say whether 80% is over all tokens. No part can be "
        "accepted more often than always: the rows of judged tokens say how large their ratio can be at most. "
        f"{results.sentence(CONFIDENCES, bounded)}",
    )


def most(row: Found) -> float:
    """The largest ratio that the top tenth of all judged tokens can have: all accepted there."""
    return float(row["top_over_all"]["value"] / row["tenths"][-1]["acceptance"]["value"])


def top_over_all(row: Found, figure: str) -> str:
    """The ratio of the top tenth, and for judged tokens its largest possible value."""
    limit = f", of at most {most(row):.2f}×" if figure == "top_over_all" else ""
    return f"{times(row[figure])}{limit}"


def bounded(found: Found) -> str:
    """Whether the judged tokens of any drafter can have the paper's ratio."""
    limits = [most(row_of(found, name, temperature)) for temperature in TEMPERATURES for name in DRAFTERS]
    reach = "no" if max(limits) < PAPERS_RATIO else "not every"
    return (
        f"So the judged tokens of {reach} drafter could reach {PAPERS_RATIO:g}; the limits are {min(limits):.2f} to "
        f"{max(limits):.2f}."
    )


def distributions(results: Results) -> Section:
    """SmartSpec, figure 17."""
    rows = []
    for temperature in TEMPERATURES:
        at = f"temperature {temperature:g}"
        figures: tuple[tuple[str, str, Callable[[Found], str]], ...] = (
            (
                "Median confidence, and quartiles",
                "accepted tokens have the higher confidence, a plot",
                lambda row: ", ".join(f"{kind} {quartiles(row[kind])}" for kind in ("accepted", "rejected")),
            ),
            ("Share of accepted tokens by confidence, 0 to 0.1 first", "a plot", lambda row: shares(row["accepted"])),
            ("Share of rejected tokens by confidence, 0 to 0.1 first", "a plot", lambda row: shares(row["rejected"])),
            (
                "Probability that an accepted token has a higher confidence than a rejected one",
                "",
                lambda row: INTERVAL.format_map(row["accepted_above_rejected"]),
            ),
        )
        rows += [
            results.row(
                f"{what}, {at}",
                paper,
                CONFIDENCES,
                lambda found, pick=pick, temperature=temperature: pick(row_of(found, "generic", temperature)),
            )
            for what, paper, pick in figures
        ]
    return Section(
        "Figure 17: confidence of accepted and of rejected tokens",
        tuple(rows),
        f"{SETTING} The generic drafter drafts four tokens.",
    )


def by_length(results: Results) -> Section:
    """Minions, figure 1."""
    rows = [
        results.row(
            f"{domain}, temperature {temperature:g}: accepted over drafted tokens, s = {', '.join(map(str, LENGTHS))}",
            PLOT,
            CONFIDENCES,
            lambda found, domain=domain, temperature=temperature: ", ".join(
                accepted(found, domain, temperature, length) for length in LENGTHS
            ),
        )
        for temperature in TEMPERATURES
        for domain in DOMAINS
    ]
    return Section(
        "Figure 1: acceptance rate by speculation length",
        tuple(rows),
        f"{CHAINS} {JUDGED} The generic drafter drafts. The rate is accepted over drafted tokens, as in the paper. So "
        "tokens that were not judged count as not accepted. The paper's drafters are as released (section 2), though "
        "section 2.2 calls them fine-tuned. Its words on the plot: OPT-13B is high on finance and dialogue and "
        "slightly lower on chats, Llama2-70B is low, the lowest on finance.",
    )


def row_of(found: Found, drafter: str, temperature: float) -> Found:
    """Figures by confidence of one drafter.

    Raises:
        KeyError: the drafter was not measured.
    """
    for row in found["rows"]:
        if (row["drafter"], row["temperature"]) == (drafter, temperature):
            return dict(row)
    raise KeyError(drafter)


def accepted(found: Found, domain: str, temperature: float, length: int) -> str:
    """Accepted over drafted tokens of the generic drafter at one length, with the interval."""
    return INTERVAL.format_map(share(found, domain, temperature, length))


def share(found: Found, domain: str, temperature: float, length: int) -> Found:
    """Accepted over drafted tokens of the generic drafter at one length.

    Raises:
        KeyError: the length was not measured.
    """
    wanted = "generic", domain, temperature, length
    for row in found["lengths"]:
        if (row["drafter"], row["domain"], row["temperature"], row["length"]) == wanted:
            return dict(row["accepted_over_drafted"])
    raise KeyError(length)


def tenths(row: Found) -> str:
    """Acceptance by tenth of confidence."""
    return ", ".join(f"{each['acceptance']['value']:.2f}" for each in row["tenths"])


def top_tenth(row: Found) -> str:
    """Acceptance in the top tenth, and the least confidence there."""
    best = row["tenths"][-1]
    return f"{INTERVAL.format_map(best['acceptance'])}, confidence above {best['from']:.2f}"


def times(given: Found) -> str:
    """A ratio and its interval."""
    return "{value:.2f}× ({low:.2f} to {high:.2f})".format_map(given)


def quartiles(given: Found) -> str:
    """Median and quartiles."""
    low, middle, high = given["quartiles"]
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def shares(given: Found) -> str:
    """Shares of the tokens by confidence."""
    return ", ".join(f"{share:.0%}" for share in given["shares"])
