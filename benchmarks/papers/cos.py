"""CoS: several models that write one text. ``python -m benchmarks.papers.cos [--run]``."""

from __future__ import annotations

from benchmarks.papers.collaborations import COLLABORATIVE, Collaborations
from benchmarks.papers.command import main
from benchmarks.papers.common import Page, Section
from benchmarks.papers.sources import Results, Source
from cospec.policies.theory import Process, acceptance_bound, alternate_factor, naive_factor

SOURCES: tuple[Source, ...] = ()
EQUAL, SMALL = 1.0, 0.125  # a proposer as dear as the scorer; one an eighth of it, such as 1B beside 8B


def page(results: Results) -> Page:
    """The theorems, and the tables of speedups."""
    sections = (theorems(results), *tables(results))
    return Page("cos", "CoS", sections, results.here)


def theorems(results: Results) -> Section:
    """Theorems 3.1, 3.2 and 3.6 beside the exact count of calls."""
    rows = []
    for c, gammas in ((EQUAL, (1, 2)), (SMALL, (1, 5))):
        for gamma in gammas:
            for alpha in (0.5, 0.7, 0.9):
                where = f"α = {alpha}, γ = {gamma}, c = {c:g}"
                naive = Process((alpha, alpha), (gamma, 1), alternate=False).factor((c, 1.0))
                turns = Process((alpha, alpha), (gamma, 1)).factor((c, 1.0))
                rows += [
                    results.computed(
                        f"Naive, {where}", f"{naive_factor(alpha, gamma, c):.3f}× (theorem 3.1)", f"{naive:.3f}×"
                    ),
                    results.computed(
                        f"Alternate, {where}",
                        f"{alternate_factor(alpha, gamma, c):.3f}× (theorem 3.6)",
                        f"{turns:.3f}×",
                    ),
                ]
    rows.append(
        results.computed(
            "Least acceptance of a proposer of weight 0.5 in a weighted ensemble",
            "0.5 (theorem 3.2)",
            f"{acceptance_bound((0.5, 0.5), 0):g}",
        )
    )
    return Section(
        "Theorems 3.1 and 3.6: expected speed over standard collaborative decoding",
        tuple(rows),
        "Ours counts the calls of the rounds as a Markov chain, with the default proposer after a rejection.",
    )


def tables(results: Results) -> tuple[Section, ...]:
    """Tables 2, 3, 7 and 8: the paper's ranges over its models and tasks."""
    weighted = {
        "parallel": ("WE-P", "0.62 to 0.79× (two models), 0.54 to 0.82× (three)"),
        "naive": ("without alternation", "1.32 to 1.46×"),
        "alternate": ("CoS", "1.34 to 1.62× (two models), 1.27 to 1.85× (three)"),
    }
    contrastive = {
        "parallel": ("CD-P", "0.39 to 0.59×"),
        "naive": ("SD", "0.93 to 2.04× at T = 0, 0.94 to 1.55× at T = 1"),
        "alternate": ("CoS", "1.26 to 2.23× at T = 0, 1.11 to 1.65× at T = 1"),
    }
    return (
        table(results, "Tables 2 and 7: weighted ensemble", "weighted", weighted),
        table(results, "Tables 3 and 8: contrastive decoding", "contrastive", contrastive),
    )


def table(results: Results, title: str, blend: str, methods: dict[str, tuple[str, str]]) -> Section:
    """One blend: every method over standard collaborative decoding."""
    found = results.read(COLLABORATIVE)
    settings = Collaborations(found).settings(blend) if found else ()
    rows = [
        results.row(
            f"{name}, {setting}" if setting else name,
            f"{paper} ({theirs})",
            COLLABORATIVE,
            lambda found, name=name, setting=setting: Collaborations(found).speedup(blend, setting, name),  # type: ignore[misc]
        )
        for setting in settings or ("",)
        for name, (theirs, paper) in methods.items()
    ]
    return Section(title + ", speed over standard collaborative decoding", tuple(rows))


if __name__ == "__main__":
    main("cos")
