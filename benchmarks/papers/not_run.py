"""Tables and figures of the papers that have no counterpart here, each with what it says and the reason."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.answers import few
from benchmarks.papers.common import How, Row, Run, Section
from benchmarks.papers.sources import Results
from cospec.policies.goodput.acceptance_rates import DECAY, DECAY_ALL, IDLE_DECAY, IDLE_DECAY_ALL
from cospec.policies.goodput.controller import GoodputOptions

ILLUSTRATION = "An illustration of the method; it has no figures."
NO_GPU = "This row needs models of 7 to 70 billion parameters on GPUs."
NO_TASKS = "The package has no such data sets."
Reason = str | Callable[[Results], str]


def small(results: Results) -> str:
    """Why DSD's table 1 has no row of ours."""
    return f"{few(results)} Table 2, above, has our speeds at γ = 8 and T = 1."


def greedy(results: Results) -> str:
    """The same for a row at temperature 0."""
    return f"{few(results)} Table 2, above, has our speeds with greedy decoding and drafts of 4."


def relaxed(results: Results) -> str:
    """The same for a row with the relaxation r."""
    return f"{small(results)} The relaxation r was not run."


def with_baseline(results: Results) -> str:
    """The same where one row of the table has figures of DSD's baseline."""
    same = "qx = 1 has the speed and length of table 2's Eagle3 (2.313×, 3.340), so it is probably this baseline."
    return f"{relaxed(results)} {same}"


# (table or figure, what the paper says, reason)
REMAINING: dict[str, tuple[tuple[str, str, Reason], ...]] = {
    "cosine": (
        ("Figure 1: phases of speculation", "", ILLUSTRATION),
        ("Figure 2(a): share of GEMM and GEMV", "drafting is bound by memory, verification by compute", NO_GPU),
        ("Figures 4 and 5: architecture, token fusion", "", ILLUSTRATION),
        ("Table 1: price and speed of servers and consumer GPUs", "a picture of a table", NO_GPU),
        (
            "Section 5: drafters of a request",
            "2 or 3",
            "`hedge` has the bound `at_most`. It was not run with 2 or 3, and the number was not stored.",
        ),
    ),
    "dsd": (
        (
            "Figure 1: roofline",
            "a plot",
            "The plot names no machine. `benchmarks/report/roofline.md` has the roofline of this machine.",
        ),
        ("Figure 2: decentralized speculation", "", ILLUSTRATION),
        (
            "Table 1: HumanEval, Llama3.1-8B, t = 0",
            "4.80×, length 5.93; Eagle3 Acc 0.6707, Base Acc 0.6707",
            greedy,
        ),
        (
            "Table 1: HumanEval, Qwen3-8B, t = 1, k = 1, qx = x, r = 0.90",
            "2.56×, length 3.86; Eagle3 Acc 0.8476, Base Acc 0.8537",
            relaxed,
        ),
        (
            "Table 1: HumanEval, Qwen3-8B, t = 1, k = 1, qx = x, r = 0.82",
            "2.59×, length 3.92; Eagle3 Acc 0.7988, Base Acc 0.8537",
            relaxed,
        ),
        (
            "Table 1: GSM8K, Llama3.1-8B, t = 0",
            "3.60×, length 5.51; Eagle3 Acc 0.8681, Base Acc 0.8704",
            greedy,
        ),
        (
            "Table 1: GSM8K, Qwen3-8B, t = 1, k = 1, qx = x, r = 0.90",
            "2.59×, length 4.04; Eagle3 Acc 0.9166, Base Acc 0.9227",
            relaxed,
        ),
        (
            "Table 1: HumanEval, Llama3.1-8B, t = 1: qx = 1; qx = x, top-k; the same with τ; qx = x, multi",
            "2.85×, 1.36×, 1.33×, 1.36×; length 5.26, 1.98, 1.98, 1.98; Eagle3 Acc 0.5915, 0.5549, 0.5549, 0.5061, "
            "Base Acc 0.5000; t = 0, multi: 0.6890, 0.6707",
            small,
        ),
        (
            "Table 1: HumanEval, Qwen3-8B, t = 1, k = 1: qx = 1; qx = x; qx = x, r = 0.92; qx = x, r = 0.87",
            "2.31×, 2.46×, 2.54×, 2.62×; length 3.34, 3.55, 3.81, 3.88; "
            "Eagle3 Acc 0.8171, 0.8476, 0.8598, 0.8049, Base Acc 0.8537",
            with_baseline,
        ),
        (
            "Table 1: GSM8K, Llama3.1-8B, t = 1",
            "2.53×, length 4.89; Eagle3 Acc 0.7915, Base Acc 0.7695",
            small,
        ),
        ("Table 1: GSM8K, Qwen3-8B, t = 1, k = 1, qx = x", "Base Acc 0.9227, nothing else", small),
        (
            "Table 1: injected latency, d = 0.18 to 0.79",
            "2.33 to 2.42×, length 3.58 to 3.62; Eagle3 Acc 0.8354 to 0.8719",
            "The paper does not say where and in which unit d is injected; d is the logarithm of the printed ratio.",
        ),
        (
            "Table 2: EAGLE-3",
            "1.643 to 2.313×, length 2.451 to 3.403",
            "There is no EAGLE-3 head for the package's models.",
        ),
        (
            "Table 2: AlpacaEval and MT Bench",
            "2.345×, 2.321×; length 3.593, 3.432",
            "The package's models follow no instructions.",
        ),
        (
            "Section 3.2: throughput in dialogues of several turns",
            "nearly doubled by adaptive verification",
            "The package's models hold no dialogues.",
        ),
    ),
    "cos": (
        ("Figures 1 to 3 and 7: sketches of the methods", "", ILLUSTRATION),
        ("Table 1: model pairs", "0.07 to 13 billion parameters", "The table lists models, not results."),
        (
            "Table 4: OPT-125M and OPT-13B",
            "SD 0.97 to 1.47×, CoS 2.61 to 3.95× at T = 0; SD 1.47 to 2.11×, CoS 1.69 to 2.16× at T = 1",
            NO_GPU,
        ),
        ("Figure 8: accuracy against λ on four tasks", "falls slowly as λ rises", few),
        (
            "Tables 9 and 10: Ascend 910B3",
            "WE: SD 1.47 to 1.79×, CoS 1.66 to 1.86×, 2.4 to 14.1 tokens/s; "
            "CD: SD 1.07 to 1.53×, CoS 1.16 to 1.53×, 4.5 to 16.7 tokens/s",
            "This row needs an Ascend NPU.",
        ),
    ),
    "smartspec": (
        ("Figures 2, 4, 6 and 9: batches, lengths, architecture", "", ILLUSTRATION),
        ("Table 1: models and servers", "", "The table lists models and servers, not results."),
        ("Figure 10: lengths of inputs and outputs", "", "The data sets are not in the package."),
        ("Figure 7: 70B target with tensor parallelism 4", "a plot: points near the diagonal", NO_GPU),
        (
            "Section 5: share of steps without drafts above which a request has no draft cache",
            "0.7 does well",
            f"The engine's {GoodputOptions().release_above:g} is of a request's own recent steps. It is drafted for "
            "again once that pays. Other values were not run.",
        ),
        (
            "Section 4.4: window of the moving average of acceptance",
            "performance is relatively insensitive to it",
            f"The engine's averages have fixed decays ({DECAY:g} of a request, {DECAY_ALL:g} of all; {IDLE_DECAY:g} "
            f"and {IDLE_DECAY_ALL:g} for steps without verified tokens). Others were not run.",
        ),
        (
            "Section 1: prompt lookup by kind of task",
            "more beneficial for summarization",
            NO_TASKS,
        ),
        ("Section 1: trees like Medusa's by kind of task", "more useful for online chatting", NO_TASKS),
    ),
    "minions": (
        ("Figures 3 to 7: pipeline, voting, the pool of results", "", ILLUSTRATION),
        ("Table 1: notation", "", "The table lists symbols."),
        ("Section 1: acceptance of SpecInfer's method, Llama-7B on ChatGPT prompts", "0.22", NO_GPU),
        (
            "Section 4: drafters distilled on right answers only",
            "better aligned with the target, without numbers",
            "`distillation.answers` of a recipe does this. The package's drafters learn from all texts; no drafter of "
            "right answers was trained for a comparison.",
        ),
    ),
}


def remaining(results: Results, paper: str, *others: Row) -> Section:
    """The tables and figures of a paper that were not run, and ``others`` that belong to no section."""
    rows = tuple(
        not_run(what, said, reason if isinstance(reason, str) else reason(results))
        for what, said, reason in REMAINING[paper]
    )
    return Section("Other tables, figures and claims", (*rows, *others))


def not_run(what: str, said: str, reason: str) -> Row:
    """A row without a figure of ours; no command would give one."""
    return Row(what, said, "not run", How.NOT_RUN, Run(""), reason)
