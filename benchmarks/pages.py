"""Writes ``benchmarks/report/*.md`` and the figures of pages from stored results, and the pages of modules and options.

Run ``python -m benchmarks``; ``--run`` measures first, which takes a few minutes. In README and ``docs/results.md`` a
block begins with ``<!-- figures: NAME -->`` and ends with ``<!-- end -->``; NAME is a key of ``BLOCKS``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill

from benchmarks import modules, options_page
from benchmarks.claims import claims
from benchmarks.common import ROOT
from benchmarks.headlines import headlines, summary
from benchmarks.tables import COMMANDS, block

REPORT = ROOT / "benchmarks" / "report"
PAGES = ("README.md", "docs/results.md")
BLOCKS = {"summary": summary, "claims": claims}
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
RELOADED = "The same on 2026-11-28, all engines loaded four times"
SCRIPTS = {"overhead": "benchmarks.overhead", "overhead_fp32": "benchmarks.overhead --dtype float32"}


@dataclass(frozen=True, slots=True)
class Report:
    """One page.

    Attributes:
        title: the heading.
        text: how to read the columns.
        blocks: tables, each with a heading.
        runs: words about the stored runs, from their figures; empty where there are none.
    """

    title: str
    text: str
    blocks: Sequence[tuple[str, str]]
    runs: Callable[[], str] = str


REPORTS = {
    "compare": Report(
        "Offline speed",
        "All systems of a table ran in one process, alternating in random order, greedy, prompt included in "
        "the time. `× NAME` is the speed over that system, from paired turns. `same text` is the share of "
        "outputs that equal the output of `generate`. In bfloat16 transformers rounds every sum and cospec "
        "keeps float32 sums, so near-ties fall otherwise.",
        (
            ("One request at a time", "compare_batch1"),
            ("Eight requests at once", "compare_batch8"),
            ("One request at a time, AVX2 kernels", "compare_batch1_avx2"),
            ("Eight requests at once, AVX2 kernels", "compare_batch8_avx2"),
        ),
    ),
    "earlier": Report(
        "This version and an earlier commit",
        "Two checkouts take turns with the same prompts on the same machine, in random order. A ratio is the time of "
        "this version over the time of the commit e84ea3a: below 1, this version is faster. `http` compares the mean "
        "latency of requests. The aim is at most 1.03. Lookups gain, since the library looks up drafts. Greedy pools "
        "of `vote`, `fuse` and `mix` miss the aim: they lost native parts that gained less than 5% each "
        "([measured](second_implementations.md)). `auto` starts from times that each version measures once, which "
        "differ by more than the aim; the second table has more processes, each with times of its own. In the third, "
        "each turn has a process of its own; forwards of two processes differ by some percent with the place of their "
        "memory, so `step` says less than `engine`, the part outside of the forwards. The last table has simulated "
        "clocks, so no noise, and intervals over five seeds.",
        (
            ("Closed loops", "same_speed"),
            ("Closed loops, more turns and processes", "same_speed_again"),
            ("A step, and its part outside of the forwards", "same_speed_overhead"),
            ("Servers under Poisson arrivals", "same_speed_http"),
            ("The same, more turns", "same_speed_http_again"),
            ("The same on AVX2, with HTTP parsed by httptools", "same_speed_http_avx2"),
            ("Decisions of goodput on simulated loads of that commit", "same_decisions"),
        ),
    ),
    "servers": Report(
        "Servers and forwards on the same weights",
        "Servers ran in float32 on two cores, clients included. `llama-draft` is llama.cpp with the drafter "
        "of the zoo; `off` is the cospec server without speculation. The third table compares one forward "
        "after 256 cached tokens. llama-bench computes logits of the last token only; cospec computes the "
        "logits of all rows. The last table compares greedy decoding without speculation, in the shape of "
        "Qwen2.5-0.5B with random weights; above 1 cospec is faster.",
        (
            ("Servers, one request at a time", "servers_batch1"),
            ("Servers, eight requests at once", "servers_batch8"),
            ("One forward", "llamacpp"),
            ("Engines without a server", "peers"),
        ),
    ),
    "gpu": Report(
        "Decoding on one GPU",
        "Random weights in the shapes of Qwen3, in bfloat16; prompts have 128 tokens, and outputs too. `static` is "
        "`generate` of transformers with a static cache, compiled; `continuous` is its continuous batching. *least* is "
        "the time in which the GPU copies as many bytes as a step reads. `without` names what cospec lacks: Triton's "
        "attention, Triton's norms and gates, CUDA graphs, or Triton's draws. The second table of a model is at "
        "temperature 1, prompts included. Its drafter has four of the target's layers, and accepts about as often as a "
        "trained one. `assisted` is assisted generation of transformers, and `plain` its generation without a drafter. "
        "Turns of one system with drafts differ by up to 1.7 times; the cause is not measured. Rows that "
        "the time did not allow are absent, and intervals of few turns are wide.",
        (
            ("Qwen3-8B", "gpu/nvidia-h200-qwen3-8b"),
            ("Qwen3-1.7B", "gpu/nvidia-h200-qwen3-1.7b"),
            ("Qwen3-0.6B", "gpu/nvidia-h200-qwen3-0.6b"),
        ),
    ),
    "roofline": Report(
        "Roofline and overhead",
        "*Least ms* is the larger of bytes over bandwidth and operations over FLOP rate. *share* is *least "
        "ms* over the measured time, of the target's forwards and of whole steps. A share above 100% means "
        "that the processor's caches held a part of the weights. *engine* is the time of a step outside of "
        "the models' forwards.",
        (
            ("Roofline, bfloat16", "roofline"),
            ("Roofline, float32", "roofline_fp32"),
            ("Overhead, bfloat16", "overhead"),
            ("Overhead, float32", "overhead_fp32"),
        ),
    ),
    "gguf": Report(
        "Forwards on GGUF files, against llama.cpp",
        "Both systems take turns in one process, with the same number of threads. They compute the same rows "
        "after 256 cached tokens. The files have random weights. *floor* is the time of reading the weights of one row "
        "at the measured bandwidth; of a mixture, those are the chosen experts. *ratio* is cospec's time over "
        "llama.cpp's, with its 95% interval. *least ratio* is the floor over llama.cpp's time. The aims are 0.7 for "
        "one row, which is out of reach where the least ratio is larger, and 1 for prompts, which all meet. The "
        "memory of the processor with AVX-512 gives 50 or 80 GB/s to a process. 11 of 37 single rows miss 0.7: two at "
        "80 GB/s have 0.71 and 0.74, eight at 50 GB/s 0.72 to 0.82, and one on the processor with AVX2 alone 0.77. "
        "Other programs use the memory too, so a forward can be faster than a floor that was measured before and "
        "after. *× one row* is cospec's time over its time for one row; the aims are 1.15 for four rows and 1.4 for "
        "eight. Where they are missed, the arithmetic of several rows takes longer than reading the file: mostly with "
        "AVX2 kernels, and with 4 bits. Rows of a mixture choose different experts. llama.cpp has the best "
        "instructions of the machine; for *both with AVX2* it was built without AVX-512. After a long context the "
        "floor is that of the weights alone. The tables of servers count tokens per second over HTTP, prompts "
        "included. Both servers draft four tokens with the same model at any load, and an equal share of draft tokens "
        "is right. There *ratio* is cospec's speed over llama.cpp's. Where *draft over off* is below 1, drafts of this "
        "one length cost more than they save.",
        (
            ("Qwen2.5-0.5B", "gguf_qwen2.5-0.5b_avx512_bf16"),
            ("Llama-3.2-1B", "gguf_llama-3.2-1b_avx512_bf16"),
            ("Llama-3.2-1B again", "gguf_llama-3.2-1b_avx512_bf16_again"),
            ("Llama-3.2-1B, more types", "gguf_llama-3.2-1b_avx512_bf16_more_types"),
            ("Qwen3-1.7B", "gguf_qwen3-1.7b_avx512_bf16"),
            ("Qwen3-4B", "gguf_qwen3-4b_avx512_bf16"),
            ("Qwen3-4B again, with prompts of 2,048", "gguf_qwen3-4b_avx512_bf16_again"),
            ("Qwen3-30B-A3B, 8 of its 48 layers", "gguf_qwen3-30b-a3b-8-layers_avx512_bf16"),
            ("Llama-3.2-1B after 8,192 tokens", "gguf_llama-3.2-1b_avx512_bf16_context_8192_float16"),
            ("Qwen2.5-0.5B, both with AVX2", "gguf_qwen2.5-0.5b_avx2_llama_cpp_avx2"),
            ("Llama-3.2-1B, both with AVX2", "gguf_llama-3.2-1b_avx2_llama_cpp_avx2"),
            ("Qwen3-1.7B, both with AVX2", "gguf_qwen3-1.7b_avx2_llama_cpp_avx2"),
            ("Qwen3-4B, both with AVX2", "gguf_qwen3-4b_avx2_llama_cpp_avx2"),
            ("Llama-3.2-1B, a processor with AVX2 alone", "gguf_llama-3.2-1b_avx2_alone"),
            ("Servers, Qwen2.5-0.5B in Q4_0", "gguf_server_qwen2.5-0.5b_q4_0_avx512_bf16"),
            ("Servers, Qwen2.5-0.5B in Q8_0", "gguf_server_qwen2.5-0.5b_q8_0_avx512_bf16"),
            ("Servers, Llama-3.2-1B in Q4_0", "gguf_server_llama-3.2-1b_q4_0_avx512_bf16"),
            ("Servers, Llama-3.2-1B in Q4_K_M", "gguf_server_llama-3.2-1b_q4_k_m_avx512_bf16"),
            ("Servers, Qwen3-1.7B in Q4_K_M", "gguf_server_qwen3-1.7b_q4_k_m_avx512_bf16"),
            ("Servers, Qwen3-4B in Q4_K_M", "gguf_server_qwen3-4b_q4_k_m_avx512_bf16"),
            ("Servers, Llama-3.2-1B in Q4_0, AVX2 alone", "gguf_server_llama-3.2-1b_q4_0_avx2"),
            ("Servers, Qwen2.5-0.5B in Q4_0, AVX2 alone", "gguf_server_qwen2.5-0.5b_q4_0_avx2"),
            ("Servers, Qwen2.5-0.5B in Q8_0, AVX2 alone", "gguf_server_qwen2.5-0.5b_q8_0_avx2"),
        ),
    ),
    "weights": Report(
        "Weight formats: bandwidth and start",
        "A forward of one row in the shape of Llama 3.2 1B, with random weights. *share* is bytes over time, over "
        "the larger bandwidth that the same threads measure before and after, with prefetches. Other programs use the "
        "memory of this machine too, so its bandwidth changes within minutes, and a share is less where it changes "
        "within a turn. q8_0 misses 0.9, fp32 and bf16 miss it in the second run, and `int8` at 79 GB/s. `int8` "
        "multiplies in float32, which takes longer than reading; it stays for its 6% fewer bytes than q8_0. It loses "
        "0.12% of perplexity where q8_0 loses 0.03% (`cospec quantize zoo --type int8 --text "
        "src/cospec/core/engine.py`). A start is a new process until its first token; files are in the page cache. A "
        "start with a cold cache also "
        "writes the file of the cache. *peak* is own memory; memory before the load is not counted. All starts meet "
        "the aims: 3 s with a filled cache (`warm`), 8 s without, and a peak of 1.15. Most of the time goes to fresh "
        "memory, which this virtual machine gives slowly.",
        (("One row", "weight_bandwidth"), ("One row again", "weight_bandwidth_again"), ("Start", "load_time")),
    ),
    "products": Report(
        "Products of prompts, and attention of long contexts",
        "Products of many rows with a weight [2048, 2048] in each format, and torch's (oneDNN) in float32 and "
        "bfloat16. Prompts use the products of single rows, which have the same bits for every number of rows. "
        "Attention is of one sequence, in the shape of Llama 3.2 1B. The least time is the larger of two: reading "
        "keys and values at the measured bandwidth, and multiplying in float32 at the measured rate. Rows and the "
        "heads that share keys add multiplications, and entries of fewer bits are widened first, so they gain less "
        "than their bytes. A core waits for few loads at a time, so reading alone does not reach the bandwidth.",
        (
            ("Products of many rows", "prompt_products"),
            ("Products of many rows, both with AVX2", "prompt_products_avx2"),
            ("Attention", "attention"),
        ),
    ),
    "load": Report(
        "Latency under load",
        "Poisson arrivals of three domains. At every rate all configurations serve the same requests in short "
        "turns. Ratios are ratios of latencies of `auto` to another configuration, so below 1 is better. *the "
        "best* is chosen after the run; *the chosen* was best in all other turns. The last column is the "
        "median of the ratios of single turns, with the interval of that median. *control* is the ratio of two engines "
        "without speculation. Commands without `--restarts` loaded each engine once, with weights of its own. Two "
        "engines of one configuration then differed by up to 9% on some machines, by where their weights lie in "
        "memory, and the intervals of these runs do not show that.",
        (
            ("AVX-512 with bf16", "load_2-x-amd-epyc_avx512_bf16"),
            ("The same on 2026-11-23", "load_2-x-amd-epyc_avx512_bf16_earlier"),
            ("The same on 2026-11-22", "load"),
            (RELOADED, "load_2-x-amd-epyc-family-26-model-2_avx512_bf16"),
            ("AVX-512", "load_2-x-amd-epyc_avx512"),
            (RELOADED, "load_2-x-amd-epyc-family-26-model-2_avx512"),
            ("AVX2", "load_2-x-amd-epyc_avx2"),
            (RELOADED, "load_2-x-amd-epyc-family-26-model-2_avx2"),
            ("AVX2 alone: a processor without AVX-512", "load_2-x-amd-epyc-family-25-model-1_avx2"),
            ("A second process takes a core now and then", "load-disturbed_2-x-amd-epyc_avx512_bf16"),
            ("The same with AVX-512", "load-disturbed_2-x-amd-epyc_avx512"),
            ("The same with AVX2", "load-disturbed_2-x-amd-epyc_avx2"),
        ),
    ),
    "pool": Report(
        "Pools of drafters",
        "Single drafters draft a chain of four tokens, or a tree of as many nodes as the pools (`tree`). *per "
        "call* is tokens per forward of the target; *verified* is the target's tokens per committed token. The "
        "table of times splits steps: *scoring* is what all drafters read of prompts and outputs so that one is "
        "chosen. Before the runs of one drafter per request every system has written outputs for 20 other prompts of "
        "each domain, because `hedge` learns which drafters are best for which prompts; no prompt comes twice. Times "
        "are means, so pauses of the machine count. One drafter per request accepts more, and needs less of the "
        "target. Scores of a few prompts, groups of requests whose drafters draft one after the other, and the choice "
        "in Python cost a part of this gain. *tokens/s at most* is the ratio if the choice cost nothing: the target's "
        "time of the pool, with the drafting and the rest of the single drafter. `generic` is the best member for all "
        "prompts. Over the best member for the prompts of one domain, with outputs of 48 tokens, one drafter per "
        "request is mostly slower: there is little to choose, and short outputs do not pay for the choice. "
        "`copy`, prompt lookup, is no member; at eight requests it is faster than any member, because it "
        "drafts little, and four tokens of a model cost more there than they save.",
        (
            ("Drafters alone and together", "pool"),
            ("One drafter per request, one request at a time: where the time goes", "pool_one_alone"),
            ("One drafter per request, eight requests at a time", "pool_one"),
        ),
    ),
    "heads": Report(
        "Medusa heads",
        "Accuracy of each head, and acceptance lengths of full and sparse trees.",
        (("Heads and trees", "heads"),),
    ),
    "ensembles": Report(
        "Several models, one distribution",
        "Speed over `standard`, which asks every model for every token. `parallel` asks all models in "
        "threads. In `plain` the last member drafts, and in `outside` "
        "a drafter that is no member. In `naive` one member proposes. `alternate` is the default. "
        "*prompts too* is `alternate` with the prefill in the time. `weighted-two` and "
        "`weighted-three` blend models of one size; `weighted-small` (λ = 0.3) and `contrastive` blend a "
        "large and a small model. Eight requests end at different times in all ways but `standard` and `parallel`, so "
        "small batches remain. The theorems are about two models; theorem 3.6 needs models that alternate.",
        (
            ("Speed over standard decoding", "collaborative"),
            ("The same with AVX2 kernels", "collaborative_avx2"),
            ("Simulated from acceptance and forward times", "simulated_ensembles"),
        ),
    ),
    "execution_modes": Report(
        "Execution modes",
        "The target of the zoo and its drafter, four tokens a draft, greedy. *overlap* is the working time of drafter "
        "and target over the elapsed time. Drafter nodes and their target have injected times and delays. Each "
        "message waits for the delay of its link. A round asks for drafts and waits; commits were sent before. Times "
        "of rounds are medians of 120 rounds. Encryption costs too little for these medians to show.",
        (
            ("Speed over sequential", "pipelining"),
            ("A round through a drafter node on the same machine", "node_overhead"),
            ("Drafter nodes over slow links, high load", "cosine_nodes_links"),
            ("Drafter nodes over slow links, low load", "cosine_nodes_links_low"),
        ),
    ),
    "policies": Report(
        "Cost and gain of policies",
        "Time that a policy takes to plan and to learn, on simulated steps, and what options gain. Loads are "
        "requests per second in the engine and requests at a time in scenarios. Steps have the times of a processor "
        "with AVX-512, so a slower processor has larger shares. The growing limit of draft lengths is the default. "
        "Scenarios compare it with a limit of 8 tokens. In the engine *limit of 8* is a variant, so a figure below 1 "
        "is a gain of the growing limit. All other options are off by default. Why some options gain in scenarios and "
        "not in the engine was not measured.",
        (("Time of a decision", "policy_cost"), ("Gain of options", "policy_gain")),
    ),
    "second_implementations": Report(
        "Second implementations",
        "Speed of whole engines on the zoo's target, with a native part over the same engine with the readable part. "
        "The docstring of `benchmarks/second_implementations.py` names the files of each pair. Both engines run in "
        "turns. A native part stays for a gain of at least 1.05 at a batch, or for the reason in the last column.",
        (("Native parts over their readable twins", "second_implementations"),),
    ),
    "simulation": Report(
        "The simulator against the engine",
        "Relative errors of the simulated latency, and of a second run of the engine on the same requests. The "
        "simulator gets the arrivals, the output lengths, which guesses of the drafter are right, and the speed of the "
        "machine from the run next to it.",
        (("Latencies", "fidelity"),),
    ),
}  # fmt: skip
INDEX = (
    "# Benchmark reports\n\nWritten by `python -m benchmarks` and `python -m benchmarks.papers`.\n"
    "The source is `benchmarks/results`. Do not edit.\n"
    "Intervals are 95%. [docs/results.md](../../docs/results.md) has the papers' headlines.\n\n"
)


HEADLINES = (
    "\n\n## Headlines\n\nSpeeds are ratios: above 1 is faster. Latencies are ratios: below 1 is better. The target\n"
    "has 22.4 M parameters and its drafter 1.1 M. All figures are of two cores of an AMD EPYC.\n\n"
)


def page(name: str) -> str:
    """The whole text of one report."""
    report = REPORTS[name]
    text = fill(f"{report.text} {report.runs()}".strip(), 120)
    parts = [f"# {report.title}\n\n<!-- Written by `python -m benchmarks`. Do not edit. -->\n\n{text}\n"]
    parts += [f"\n## {title}\n{block(result)}" for title, result in report.blocks]
    return "".join(parts)


def filled(text: str) -> str:
    """The text with every block written again."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", text)


def measure(names: Sequence[str]) -> None:
    """Run the commands whose name has one of ``names`` in it; all for none."""
    to = "--result-dir benchmarks/results --result-filename"
    runs = {name: f"cospec {words} {to} {name}.json" for name, words in COMMANDS.items()}
    runs |= {name: f"{words} --name {name}" for name, words in SCRIPTS.items()}
    for name, words in runs.items():
        if not names or any(part in name for part in names):
            subprocess.run([sys.executable, "-m", *shlex.split(words)], cwd=ROOT, check=True)


def main() -> None:
    """Measure where ``--run`` asks for measurements, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="NAME", help="measure first; without a name: everything")
    options = parser.parse_args()
    if options.run is not None:
        measure(options.run)
    REPORT.mkdir(exist_ok=True)
    lines = [f"* [{report.title}]({name}.md)" for name, report in REPORTS.items()]
    lines.append("* [Figures of the papers, and figures of cospec](papers.md)")
    lines.append("* [Counts of files, lines, names and words](counts.md)")
    (REPORT / "README.md").write_text(INDEX + "\n".join(lines) + HEADLINES + headlines(), encoding="utf-8")
    for name in REPORTS:
        (REPORT / f"{name}.md").write_text(page(name), encoding="utf-8")
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    modules.write()
    options_page.write()
