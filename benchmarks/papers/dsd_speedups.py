"""DSD's table 2: speed over plain decoding, on one machine without links."""

from __future__ import annotations

from functools import partial

from benchmarks.papers.answers import ANSWERS
from benchmarks.papers.common import Section, paragraph
from benchmarks.papers.comparisons import COMPARED, DRAFTED, EIGHT_TOKENS, in_domain, over_plain
from benchmarks.papers.not_run import not_run
from benchmarks.papers.sources import Found, Results

EIGHT = "draft-8"
TABLE_2 = {  # of DSD and of Eagle3: speeds over plain decoding, and average lengths
    "AlpacaEval": ((2.345, 2.108), (3.593, 2.790)),
    "MT Bench": ((2.321, 1.922), (3.432, 2.706)),
    "CNN/DailyMail": ((1.905, 1.643), (2.987, 2.451)),
    "HumanEval": ((2.562, 2.313), (3.855, 3.340)),
    "GSM8K": ((2.517, 2.274), (4.042, 3.403)),
}


def section(results: Results) -> Section:
    """Table 2; on one machine, hence without links."""
    papers = {
        "code": ("HumanEval, γ = 8", "2.562×, length 3.855"),
        "math": ("GSM8K, γ = 8", "2.517×, length 4.042"),
        "prose": ("CNN/DailyMail, γ = 8", "1.905×, length 2.987"),
    }
    rows = [
        results.row(
            f"Speedup, {ours} ({theirs} in the paper)",
            paper,
            EIGHT_TOKENS,
            partial(in_domain, domain=ours, drafted=EIGHT),
            "exact, γ = 8, T = 1",
        )
        for ours, (theirs, paper) in papers.items()
    ]
    rows += [
        results.row(
            f"Speedup, {ours}, greedy, drafts of 4",
            "",
            COMPARED[1],
            partial(in_domain, domain=ours),
            "exact, γ = 4, T = 0",
        )
        for ours in papers
    ]
    rows += [
        not_run(
            f"Table 2: speed and average length of DSD over Eagle3, {name}",
            f"{speed / its_speed:.2f}×, length {length / its_length:.2f}× (computed)",
            "There is no EAGLE-3 head for the package's models.",
        )
        for name, ((speed, its_speed), (length, its_length)) in TABLE_2.items()
    ]
    rows += [
        results.row(
            f"{name}: right answers, exact",
            said,
            ANSWERS,
            lambda found, name=name: answered(found, name),
            "the first questions of the set; Wilson's interval",
        )
        for name, said in (
            ("HumanEval", "0.8537 (Qwen3-8B), 0.5000 to 0.6707 (Llama3.1-8B): Base Acc"),
            ("GSM8K", "0.9227 (Qwen3-8B), 0.7695 to 0.8704 (Llama3.1-8B): Base Acc"),
        )
    ]
    text = paragraph(
        "The paper's figures are over 4 to 8 nodes with links of 100 Gbit/s, at temperature 1; those of HumanEval are "
        "Qwen3-8B's of table 1. They relax verification (r = 0.90 for HumanEval); ours are exact. Prompts of code and "
        "math are of the same sets. Ours are of one machine without links, one request at a time. The "
        "paper has 2.59× for GSM8K in table 1 and in the "
        "abstract, and 2.517× in table 2, with one length.",
        "It also names top-k sampling with k = 1, which would be greedy; our runs sample from the whole vocabulary.",
        "Our speeds include the time of prompts. Those of a domain have no interval.",
        results.sentence(EIGHT_TOKENS, partial(together, drafted=EIGHT, words="At γ = 8 and T = 1")),
        results.sentence(COMPARED[1], partial(together, drafted=DRAFTED, words="Greedily with drafts of 4")),
    )
    return Section("Table 2: speedup over plain decoding", tuple(rows), text)


def together(found: Found, drafted: str, words: str) -> str:
    """On how many prompts the speeds of a domain are, and the speed over all domains."""
    repetitions = found["settings"]["repetitions"]
    (run,) = (run["by_category"] for run in found["runs"] if run["label"] == drafted)
    prompts = " or ".join(sorted({str(each["completed"] // repetitions) for each in run.values()}))
    return (
        f"{words} each is of {prompts} prompts, written {repetitions} times; all domains together have "
        f"{over_plain(found, drafted)}."
    )


def answered(found: Found, name: str) -> str:
    """Right answers of a set, and the interval of their share.

    Raises:
        KeyError: the set was not answered.
    """
    each = found["sets"][name]
    low, high = each["interval"]
    return f"{each['right']} of {each['count']}, {each['right'] / each['count']:.3f} ({low:.3f} to {high:.3f})"
