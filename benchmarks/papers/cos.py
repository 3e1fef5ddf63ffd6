"""CoS: several models that write one text. ``python -m benchmarks.papers.cos [--run]``."""

from __future__ import annotations

from benchmarks.papers.collaborations import (
    AVX2,
    COLLABORATIVE,
    KERNELS,
    PAIRED,
    QUALITY,
    SWEEPS,
    Collaborations,
    quality,
)
from benchmarks.papers.command import main
from benchmarks.papers.common import Page, Row, Section, paragraph
from benchmarks.papers.cos_claims import claims
from benchmarks.papers.cos_settings import SETTINGS, SPEEDS, Said, Setting
from benchmarks.papers.cos_theory import predictions, theorems
from benchmarks.papers.not_run import remaining
from benchmarks.papers.sources import Found, Results, Source

SOURCES: tuple[Source, ...] = ()
PROMPTS = "Speeds leave out the time of prompts, except for the last cache page of each."
CALLS = {  # of two models for a token, by method: the paper's ideal, and a note
    "alternate": ("1 at best (γ = 1, figure 2)", "the paper's bound, at most 2, is for γ = 1"),
    "naive": ("1.25 at best (γ = 4, section 1)", "with γ proposed tokens 1 + 1 / γ at best"),
}


def page(results: Results) -> Page:
    """The theorems, and the tables of speedups."""
    sections = (theorems(results), *tables(results), remaining(results, "cos", *claims(results)))
    return Page("cos", "CoS", sections, results.here)


def tables(results: Results) -> tuple[Section, ...]:
    """Tables 2, 3, 7 and 8, and figures 4 to 6: the paper's ranges over its models and tasks."""
    return (
        *(table(results, setting) for setting in SETTINGS),
        raw(results),
        predictions(results),
        sweeps(results),
        qualities(results),
    )


def table(results: Results, setting: Setting) -> Section:
    """Every method over standard collaborative decoding, one request at a time and eight."""
    rows = []
    for place, temperature in enumerate(setting.temperatures):
        for source, kernels in KERNELS.items():
            rows += speeds(results, source, setting, place, kernels)
            rows += gains(results, source, setting, place, kernels)
        rows += [
            results.row(
                f"Calls of the models for a token, {method}, T = {temperature:g}",
                ideal if setting.models == 2 else "",
                COLLABORATIVE,
                lambda found, t=temperature, m=method: read(found, setting).calls(m, t),
                note if setting.models == 2 else "",
            )
            for method, (ideal, note) in CALLS.items()
        ]
        rows.append(
            results.row(
                f"The engine's estimate of each model's acceptance at the end of a domain, T = {temperature:g}",
                setting.bound,
                COLLABORATIVE,
                lambda found, t=temperature: read(found, setting).acceptance(t),
            )
        )
    elsewhere = losses(results, AVX2, setting)
    text = paragraph(
        setting.text,
        results.sentence(COLLABORATIVE, sizes),
        "Rows with AVX2 are of a run with the kernels of a processor without AVX-512.",
        losses(results, COLLABORATIVE, setting),
        f"With AVX2: {elsewhere}" if elsewhere else "",
    )
    return Section(f"{setting.title}, speed over standard collaborative decoding", tuple(rows), text)


def losses(results: Results, source: Source, setting: Setting) -> str:
    """Why the default is slower than other methods in a run, where it is, and than standard decoding together."""
    return paragraph(
        *(
            results.sentence(source, lambda found, o=other, t=t: read(found, setting).loss(o, t, setting.large))
            for t in setting.temperatures
            for other in setting.gains
        ),
        *(
            results.sentence(source, lambda found, o=other, t=t: read(found, setting).on_domains(o, t))
            for t in setting.temperatures
            for other in setting.gains
        ),
        *(results.sentence(source, lambda found, t=t: read(found, setting).outside(t)) for t in setting.temperatures),
        *(
            results.sentence(source, lambda found, o=other, t=t: read(found, setting).loss(o, t, setting.large, 8))
            for t in setting.temperatures
            for other in setting.gains
        ),
        *(
            results.sentence(source, lambda found, t=t: read(found, setting).slower_together(t, setting.large))
            for t in setting.temperatures
        ),
    )


def sizes(found: Found) -> str:
    """How much was run."""
    options = found["options"]
    rows = [row for each in found["settings"].values() for row in each]
    neither = "Figures differ clearly where neither lies in the other's interval."
    if all(PAIRED in row for row in rows):
        neither = (
            "The default differs clearly from another method where the interval of their paired ratio excludes 1. "
            "Without paired ratios, figures differ clearly where neither lies in the other's interval."
        )
    return (
        f"{options['prompts']} prompts of each domain, {options['tokens']} tokens; intervals are over prompts. "
        f"{PROMPTS} {neither} Rows of eight requests are of two "
        "groups in each domain, whose figures stand in square brackets; only *all* has an interval, over six groups. "
        "While it writes, the engine tries other proposals than its choice at the end; the calls of a token count all."
    )


def speeds(results: Results, source: Source, setting: Setting, place: int, kernels: str) -> list[Row]:
    """All methods at one temperature, and the default with eight requests."""
    temperature = setting.temperatures[place]
    rows = [
        results.row(
            f"{method}, T = {temperature:g}{kernels}",
            at(said, place),
            source,
            lambda found, m=method: read(found, setting).over_standard(m, temperature, 1),
            chosen(results, source, setting.name, temperature, 1) if method == "alternate" else "",
        )
        for method, said in setting.paper.items()
    ]
    rows.append(
        results.row(
            f"alternate, T = {temperature:g}, 8 requests at once{kernels}",
            "",
            source,
            lambda found: read(found, setting).over_standard("alternate", temperature, 8),
            chosen(results, source, setting.name, temperature, 8),
        )
    )
    return rows


def gains(results: Results, source: Source, setting: Setting, place: int, kernels: str) -> list[Row]:
    """The default over other methods at one temperature."""
    temperature = setting.temperatures[place]
    note = results.sentence(source, lambda found: of_pairs(read(found, setting), temperature))
    return [
        results.row(
            f"alternate over {other}, T = {temperature:g}{kernels}",
            at(said, place),
            source,
            lambda found, o=other: read(found, setting).over(o, temperature),
            note,
        )
        for other, said in setting.gains.items()
    ]


def of_pairs(found: Collaborations, temperature: float) -> str:
    """What ratios over other methods are, and the domains at whose end nothing alternates."""
    paired, domains = found.paired(temperature), found.one_sided(temperature)
    medians = "a quotient of two medians over prompts; *all* may lie outside the domains"
    one_sided = f"; nothing alternates at the end of {', '.join(domains)}" if domains else ""
    return f"{'the median of paired ratios' if paired else medians}{one_sided}"


def chosen(results: Results, source: Source, setting: str, temperature: float, batch: int) -> str:
    """A note on the proposals of the default; empty where nothing is stored."""
    return results.sentence(source, lambda found: Collaborations(found, setting).chosen(temperature, batch))


def at(said: Said, place: int) -> str:
    """What the paper has for a temperature, by its place."""
    return said if isinstance(said, str) else said[place]


def sweeps(results: Results) -> Section:
    """Figures 4 to 6."""
    papers = {
        ("weighted-two", "lambda"): "at least 1.5× for every λ (figure 4: two pairs, HumanEval and GSM8K)",
        ("weighted-small", "lambda"): "rises with λ (figure 8)",
        ("contrastive", "mu"): "above 1× for every μ, falls as μ rises (figure 5: Llama-3, HumanEval and GSM8K)",
        ("weighted-two", "gamma"): "flat, since both models cost the same (figure 6a: HumanEval and GSM8K)",
        (
            "contrastive",
            "gamma",
        ): "rises, then falls; on HumanEval in one direction only (figures 6b and 6c: HumanEval and GSM8K)",
    }
    rows = [
        results.row(
            f"{value}, {name}",
            paper,
            SWEEPS,
            lambda found, name=name, value=value: Collaborations(found, name).sweep(value),
        )
        for (name, value), paper in papers.items()
    ]
    return Section(
        "Figures 4 to 6: speed against λ, μ and γ",
        tuple(rows),
        "The default over standard decoding: 9 prompts of three domains, one request at a time. T is 1, and 0 for "
        f"contrastive decoding; the paper's figure 5 has both. {apart(results)}The engine chooses the lengths, and "
        "whether models alternate, for λ and μ. For γ the last model proposes γ tokens and the other model one. The "
        "paper says that γ is from 1 to 5, and also that the speed falls after γ = 5 (section 4.3).",
    )


def raw(results: Results) -> Section:
    """Tables 5 and 6: tokens per second."""
    rows = [
        results.row(
            f"{name}, {method}, T = {temperature:g}",
            paper,
            COLLABORATIVE,
            lambda found, n=name, m=method, t=temperature: Collaborations(found, n).raw(m, t),
            chosen(results, COLLABORATIVE, name, temperature, 1) if method == "alternate" else "",
        )
        for (name, temperature), papers in SPEEDS.items()
        for method, paper in zip(("standard", "plain", "alternate"), papers, strict=True)
    ]
    return Section(
        "Tables 5 and 6: tokens per second",
        tuple(rows),
        paragraph(
            "The paper's speeds are of other models on other machines; compare the rows of a setting.",
            PROMPTS,
            "*Plain* is the paper's SD. The pairs are Llama-Vicuna (7B), Qwen-3b and Qwen-1.5b; Llama-3, Llama-2 and "
            "OPT. The paper contradicts itself: for three models table 5 has 1.27× on GSM8K and 1.53× on CNNDM, "
            "computed, and table 2 has these two the other way round. SD has 0.95× and 0.92× there, computed, "
            "and 0.92× and 0.95× in table 2. For OPT on HumanEval at T = 0 table 4 has 3.28×, and table 6 has 3.34×, "
            "computed. SD has 0.97× there in table 4, and 0.99× by table 6, computed.",
        ),
    )


def qualities(results: Results) -> Section:
    """Figure 8: quality and speed."""
    rows = [
        results.row(
            f"Nats per token of {domain} answers by {option}, {words}",
            "accuracy falls slowly as λ rises" if (models, option) == ("small", "lambda") else "",
            QUALITY,
            lambda found, m=models, o=option, d=domain: quality(found, m, o, d),
        )
        for models, words in (("small", "a small second model"), ("equal", "a second model of the same size"))
        for option in ("lambda", "mu")
        for domain in ("code", "math", "prose")
    ]
    return Section(
        "Figure 8: quality and speed",
        tuple(rows),
        "Nats per token of held-out reference answers; lower is better. λ is the weight of the second model, μ the "
        "share that contrastive decoding subtracts. The second model of the same size is the target with an adapter. "
        f"{results.sentence(QUALITY, answers)} The speeds at λ from 0.1 to 0.9 and μ from 0.1 to 0.5 stand above. "
        "Those of λ are of both second models, those of μ of the small one. The paper shows accuracy "
        "on four tasks, and only for λ.",
    )


def apart(results: Results) -> str:
    """How the run of the sweeps differs from that of the tables; empty where one of the runs is missing."""
    swept = results.sentence(SWEEPS, circumstances)
    tables = " and ".join(filter(None, (results.sentence(source, circumstances) for source in KERNELS)))
    if not (tables and swept):
        return ""
    return (
        f"The sweeps are a run of their own, {swept}, with other prompts than the tables above, {tables}. So the same "
        "λ or μ has another speed in the tables. "
    )


def circumstances(found: Found) -> str:
    """When and how a run took place."""
    machine = found["machine"]
    count = machine["threads"]
    return f"on {machine['date'][:10]} with {count} thread{'s' if count > 1 else ''} and {machine['kernels']}"


def answers(found: Found) -> str:
    """How many answers were scored."""
    return f"{found['per_domain']} answers of each domain."


def read(found: Found, setting: Setting) -> Collaborations:
    """The rows of a setting."""
    return Collaborations(found, setting.name)


if __name__ == "__main__":
    main("cos")
