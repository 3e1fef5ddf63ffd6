"""What CoS prints for each kind of collaboration, and which of our settings is its counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.papers.common import PLOT

Said = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Setting:
    """Models and a blend of ``benchmarks.collaborative``, and what the paper says of the like.

    Attributes:
        paper: by method; two where the paper has a figure for each temperature.
        gains: of ``alternate`` over another method, from the paper's tables; two for two temperatures.
        bound: on the acceptance.
        large: how many of the models, from the first on, are of the largest size.
    """

    name: str
    title: str
    models: int
    temperatures: tuple[float, ...]
    paper: Mapping[str, Said]
    text: str = ""
    gains: Mapping[str, Said] = field(default_factory=lambda: {"naive": "", "plain": ""})
    bound: str = ""
    large: int = 1


SETTINGS = (
    Setting(
        "weighted-two",
        "Tables 2 and 7: weighted ensemble of two models of one size",
        2,
        (1.0,),
        {
            "parallel": "0.62 to 0.79×",
            "plain": "1.06 to 1.27× (SD)",
            "naive": "1.32 to 1.46× (without alternation, two pairs, two tasks)",
            "alternate": "1.34 to 1.62×",
            "outside": "",
        },
        "Each model has weight 0.5. The second model is the target of 22.4 M parameters with an adapter of rank 24, "
        "trained for 50 steps. So both models are almost the same, and acceptance is high. *Parallel* asks both models "
        "at once. In *plain*, the paper's SD, the last member drafts. In *outside* a small drafter that is no member "
        "drafts. *Naive* has one proposer. *Alternate* is CoS and the default: the engine chooses the lengths and "
        "whether models alternate. Over the four groups of its table 2 the paper has a mean of 1.65× on HumanEval "
        "(code here) and 1.36× on CNNDM (prose here), by table 5 1.43×. *Two pairs* are Llama-Vicuna and Qwen-3b, *two "
        "tasks* HumanEval and GSM8K. The paper tests γ of 1 and of 5 and reports the better one (4.1).",
        {
            "naive": "1.08 to 1.16× (table 7, two pairs, two tasks, computed)",
            "plain": "1.18 to 1.43× (table 2, computed)",
        },
        "at least 0.5 (theorem 3.2, corollary 3.3)",
        large=2,
    ),
    Setting(
        "weighted-three",
        "Table 2: weighted ensemble of three models",
        3,
        (1.0,),
        {
            "parallel": "0.54 to 0.82×",
            "plain": "0.92 to 0.98× (SD)",
            "naive": "",
            "alternate": "1.27 to 1.85×",
            "outside": "",
        },
        "Each model has a third of the weight. The second and the third model are the target with such adapters. The "
        "methods are those of two models. In the paper each model proposes one token (4.1); here the engine chooses.",
        {"naive": "", "plain": "1.34 to 1.93× (table 2, computed)"},
        "at least 0.33 each (theorem 3.2 is for two models; its proof holds)",
        large=3,
    ),
    Setting(
        "weighted-small",
        "Figure 8: a small share of a small model",
        2,
        (1.0,),
        {"parallel": "", "plain": "", "naive": "", "alternate": PLOT},
        "The weights are 0.7 for the large model and 0.3 for the small one, so λ is 0.3.",
        bound="at least 0.7 and 0.3 (theorem 3.2)",
    ),
    Setting(
        "contrastive",
        "Tables 3 and 8: contrastive decoding of a large and a small model",
        2,
        (0.0, 1.0),
        {
            "parallel": ("0.40 to 0.59×", "0.39 to 0.56×"),
            "plain": ("0.93 to 2.04× (SD)", "0.94 to 1.55× (SD)"),
            "naive": (
                "1.18 to 1.98× (without alternation, two tasks)",
                "0.89 to 1.41× (without alternation, two tasks)",
            ),
            "alternate": ("1.26 to 2.23×", "1.11 to 1.65×"),
        },
        "Ours are the target and the drafter of the package, with μ = 0.1. The paper's ranges are of its Llama pairs. "
        "There CoS is faster than SD in every setting, and faster than one proposer in all but one. *Two tasks* are "
        "HumanEval and GSM8K. The paper reports the better of γ = 1 and γ = 5; the larger model proposes one token "
        "(4.1). Here the engine chooses.",
        {
            "naive": (
                "1.04 to 1.16× (table 8, two tasks, computed)",
                "0.99 to 1.29× (table 8, two tasks, computed)",
            ),
            "plain": ("1.02 to 1.56× (table 3, computed)", "1.01 to 1.22× (table 3, computed)"),
        },
    ),
)
# tokens per second of tables 5 and 6: standard, SD, CoS
SPEEDS = {
    ("weighted-two", 1.0): (
        "20.5 to 22.6 (7B), 47.0 to 49.6 (3B), 76.6 to 82.6 (1.5B)",
        "23.9 to 28.7 (7B), 50.7 to 56.1 (3B), 84.3 to 91.7 (1.5B)",
        "28.8 to 35.7 (7B), 64.8 to 80.4 (3B), 103 to 129 (1.5B)",
    ),
    ("weighted-three", 1.0): ("53.7 to 57.0", "51.1 to 55.1", "68.3 to 105"),
    ("contrastive", 0.0): (
        "38.1 to 39.4 (Llama-3), 46.2 to 49.7 (Llama-2), 19.6 to 23.5 (OPT)",
        "59.2 to 80.3 (Llama-3), 43.0 to 78.0 (Llama-2), 23.2 to 28.8 (OPT)",
        "61.3 to 87.8 (Llama-3), 60.1 to 83.5 (Llama-2), 61.4 to 78.5 (OPT)",
    ),
    ("contrastive", 1.0): (
        "38.1 to 39.0 (Llama-3), 43.5 to 47.5 (Llama-2), 19.5 to 23.9 (OPT)",
        "40.8 to 60.4 (Llama-3), 44.5 to 58.4 (Llama-2), 35.2 to 41.1 (OPT)",
        "45.0 to 64.3 (Llama-3), 48.3 to 65.1 (Llama-2), 36.4 to 42.1 (OPT)",
    ),
}
