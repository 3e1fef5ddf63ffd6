"""The pages of the papers: figures come from stored results, and a missing figure reads "not run"."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cosine", "dsd", "cos", "smartspec", "minions")
SMALL = "weighted-small"  # a large model, then a small one
MACHINE = {"date": "2026-01-02", "processor": "2 x Chip", "threads": 2, "torch": "2.0"}


class Room:
    """The modules of ``benchmarks.papers``, and an empty folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.papers.{name}")

    def results(self, page: str) -> Any:
        return self.sources.Results(page, self.folder, self.folder)

    def page(self, name: str) -> Any:
        return getattr(self, name).page(self.results(name))

    def store(self, name: str, figures: dict[str, Any]) -> None:
        path = self.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures), encoding="utf-8")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.syspath_prepend(str(ROOT))
    return Room(tmp_path)


def rows(page: Any) -> list[Any]:
    return [row for section in page.sections for row in section.rows]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stored_reads_not_run_with_a_command(room: Room, name: str) -> None:
    found = rows(room.page(name))
    not_run = [row for row in found if row.how == "not run"]
    assert not_run
    for row in found:
        assert row.how in tuple(room.common.How)
        assert row.what and row.ours
        assert bool(row.run.command) or (row.how == "not run" and row.note), "a command, or a reason"
        assert bool(row.run.date) is (row.how != "not run") and bool(row.run.machine) is (row.how != "not run")
    assert {row.how for row in found} <= {"not run", "computed"}


def test_a_page_comes_back_as_it_was_stored(room: Room) -> None:
    page = room.page("smartspec")
    room.common.save(page, room.folder / "papers")
    assert room.common.load("smartspec", room.folder / "papers") == page
    assert room.common.load("cosine", room.folder / "papers") is None


POOL: dict[str, Any] = {
    "machine": MACHINE,
    "options": {"model": "zoo", "prompts": 2, "only": None, "rates": [1.0, 2.5]},
    "rows": [
        {
            "system": name,
            "workload": workload,
            "temperature": 0.0,
            "acceptance": [length, length - 0.1, length + 0.1],
            "tokens_per_call": [length, 1.0, 4.0],
            "tokens_per_s": [100.0 * length, 90.0, 400.0],
            "own_share": 0.0125,
        }
        for workload in ("code", "math", "prose", "mixed")
        for name, length in (("generic", 2.0), ("code", 1.5), ("vote all", 3.0), ("union hedge", 2.5))
    ],
}


def test_a_stored_figure_comes_with_command_machine_and_date(room: Room) -> None:
    room.store("pool", POOL)
    (row,) = [row for row in rows(room.page("minions")) if row.what.startswith("Majority")]
    assert row.ours == "1.50× = 1.50× tokens per step · 1.00× steps per second" and row.how == "measured here"
    assert row.run.command == "python -m benchmarks.pool --model zoo --prompts 2 --rates 1 2.5"
    assert (row.run.machine, row.run.date) == ("2 x Chip, 2 threads, torch 2.0", "2026-01-02")
    text = room.render.document([room.page("minions")])
    assert row.run.command in text and row.run.machine in text and row.ours in text


def test_a_figure_without_machine_or_date_does_not_count(room: Room) -> None:
    room.store("pool", {**POOL, "machine": {}})
    assert all(row.how == "not run" for row in rows(room.page("minions")))


def test_what_a_file_lacks_is_not_run(room: Room) -> None:
    room.store("pool", {**POOL, "rows": POOL["rows"][:1]})
    found = {row.what: row.ours for row in rows(room.page("cosine")) if row.run.command.startswith("python -m b")}
    assert set(found.values()) == {"not run"}


def test_a_gpu_is_named_as_such(room: Room) -> None:
    on_gpu = room.sources.on_gpu
    assert on_gpu({"machine": {"processor": "Chip", "gpu": "Big one"}}) and on_gpu({"machine": {"device": "Big one"}})
    assert not on_gpu({"machine": MACHINE}) and not on_gpu({"machine": {"device": "Chip", "threads": 2}})
    room.store("pool", {**POOL, "machine": {**MACHINE, "gpu": "Big one"}})
    assert "measured on a GPU" in {row.how for row in rows(room.page("minions"))}


def test_figures_of_a_scenario_that_changed_since_do_not_count(room: Room) -> None:
    source = room.minions.LENGTHS
    given = room.scenarios.Scenario.read(room.scenarios.FOLDER / "minions-fig12.yaml")
    run = {"load": 32, "throughput": 100.0}
    stored = {"machine": MACHINE, "runs": [{**run, "variant": each.name} for each in given.variants]}
    room.store(source.file, {**stored, "scenario": room.scenarios.described(given)})
    assert room.results("minions").read(source) is not None
    assert "simulated" in {row.how for row in rows(room.page("minions"))}
    changed = given.model_copy(update={"seed": given.seed + 1})
    room.store(source.file, {**stored, "scenario": room.scenarios.described(changed)})
    assert room.results("minions").read(source) is None


def test_parts_of_a_throughput_multiply_to_its_ratio(room: Room) -> None:
    base = {"load": 8.0, "seconds": 10.0, "rounds": 100, "mean_batch": 4.0, "throughput": 80.0, "target_idle": 0.5}
    # twice the tokens of a request and step, half the requests of a step, and forwards that are twice as long
    other = {**base, "variant": "b", "mean_batch": 2.0, "target_idle": 0.0}
    runs = room.scenarios.Runs({"runs": [{**base, "variant": "a"}, other]})
    words = runs.by_parts("b", "a", 8.0)
    ratio, *parts = [float(number) for number in re.findall(r"(\d\.\d+)×", words)]
    assert parts == [2.0, 0.5, 2.0, 0.5] and ratio == pytest.approx(np.prod(parts)) == 1.0
    del base["target_idle"]
    with pytest.raises(KeyError):
        room.scenarios.Runs({"runs": [{**base, "variant": "a"}, other]}).by_parts("b", "a", 8.0)


def test_where_curves_cross(room: Room) -> None:
    latency = {
        1.0: {"off": 2.0, "k=1": 1.6, "k=3": 1.0, "auto": 1.0},
        8.0: {"off": 2.0, "k=1": 1.8, "k=3": 2.5, "auto": 2.16},
    }
    curves = room.curves.Curves(latency, "auto")
    assert curves.fastest_fixed(1.0) == "k=3 (2.00×) at 1/s"
    assert curves.stops("k=3") == "from 8/s (down to 0.80×)" and curves.stops("k=1") == "never up to 8/s"
    assert curves.worst_regret() == "1.20 of k=1, at 8/s"
    assert curves.span() == "0.93 to 2.00×"
    assert curves.rebounds() == "k=1 1.11× at 8/s, the highest rate; k=3 0.80× at 8/s, the highest rate"


def test_a_length_that_is_faster_again_has_no_single_rate(room: Room) -> None:
    latency = {1.0: {"off": 1.0, "k=3": 0.5}, 2.0: {"off": 1.0, "k=3": 1.25}, 4.0: {"off": 1.0, "k=3": 0.8}}
    curves = room.curves.Curves(latency, "auto")
    assert "0.80× at 2/s, 1.25× at 4/s" in curves.stops("k=3")
    assert "0.80× at 2/s, later up to 1.25×" in curves.rebounds()


def test_the_first_loss_ends_the_rates_with_a_speedup(room: Room) -> None:
    latency = {8.0: {"off": 1.0, "k=3": 0.9, "k=5": 0.8}, 2.0: {"off": 1.0, "k=3": 0.5, "k=5": 1.0}}
    curves = room.curves.Curves(latency, "auto")
    assert curves.loses_from("k=5") == 2.0 and curves.loses_from("k=3") == float("inf")


def test_the_papers_increases_are_read_in_two_ways(room: Room) -> None:
    figures = room.minions
    assert figures.totals(figures.multiplied) == "1.99×, 2.63×" and figures.totals(figures.added) == "1.79×, 2.21×"
    assert figures.over_parts("majority") == "+10%, +60%" and figures.over_parts("pipeline") == "+24%, +33%"


def test_what_the_engine_chose_decides_which_theorem_applies(room: Room) -> None:
    theory: dict[str, Any] = {"theorem 3.1": 1.5, "theorem 3.6": 1.9, "naive process": 2.0, "alternate process": 2.5}
    theory |= {"naive measured": 1.6, "alternate measured": 1.8, "gammas": [1, 1], "proposer": 1}
    theory |= {"alpha": [0.7, 0.7], "c": 1.0}
    calls = {"alternate": {"zoo": 0.5, "zoo:drafter": 1.0}}

    def found(form: str) -> Any:
        row = {"batch": 1, "temperature": 1.0, "domain": "code", "theory": {**theory, "form": form}}
        row["calls_per_token"] = calls
        return room.collaborations.Collaborations({"settings": {SMALL: [row]}}, SMALL)

    alternates, naive = found("alternate"), found("naive")
    assert "1.90×" in alternates.theory("alternate", "theorem 3.6", 1.0, 2)
    assert "1.90×" not in naive.theory("alternate", "theorem 3.6", 1.0, 2)
    assert "1.50×" in naive.theory("naive", "theorem 3.1", 1.0, 2)
    assert "count 1.54×" in alternates.theory("alternate", "theorem 3.6", 1.0, 2), "one token each at one cost"
    assert "one proposer, zoo:drafter, of 1 token" in naive.chosen(1.0, 1) and "zoo" not in alternates.chosen(1.0, 1)
    assert not alternates.one_sided(1.0) and naive.one_sided(1.0)


def test_models_are_named_in_the_order_of_the_setting(room: Room) -> None:
    """Stored calls are sorted by name, and proposers are counted in the order of the models."""
    theory = {"gammas": [1, 0, 3], "proposer": 2, "alpha": [0.7, 0.8, 0.9], "form": "naive"}
    calls = {"naive": {"zoo": 0.1, "zoo:target-code": 0.3, "zoo:target-prose": 0.2}}
    row = {"batch": 1, "temperature": 1.0, "domain": "code", "theory": theory, "calls_per_token": calls}
    found = room.collaborations.Collaborations({"settings": {"weighted-three": [row]}}, "weighted-three")
    assert "one proposer, zoo:target-code, of 3 tokens" in found.chosen(1.0, 1)
    assert found.acceptance(1.0) == "code zoo 0.70, zoo:target-prose none, zoo:target-code 0.90"
    assert found.calls("naive", 1.0) == "code 0.60 = 0.10 zoo + 0.20 zoo:target-prose + 0.30 zoo:target-code"


def test_paired_ratios_count_where_a_run_has_them(room: Room) -> None:
    speeds = {"alternate": [1.5, 1.4, 1.6], "naive": [2.0, 1.9, 2.1]}
    row: dict[str, Any] = {"batch": 1, "temperature": 0.0, "domain": "all", "over_standard": speeds}
    found = room.collaborations.Collaborations({"settings": {SMALL: [row]}}, SMALL)
    assert found.over("naive", 0.0) == "all 0.75×" and not found.paired(0.0)
    row["alternate_over"] = {"naive": [0.9, 0.8, 1.1]}
    assert found.over("naive", 0.0) == "all 0.90× (0.80 to 1.10)" and found.paired(0.0)
    assert found.loss("naive", 0.0, 1).endswith("0.90 times the speed of *naive*, no clear difference.")
    row["alternate_over"] = {"naive": [1.1, 1.0, 1.2]}
    assert found.loss("naive", 0.0, 1) == ""


def test_a_loss_is_explained_by_the_calls_and_their_cost(room: Room) -> None:
    calls = {
        "alternate": {"zoo": 0.5, "zoo:drafter": 1.0},
        "naive": {"zoo": 0.4, "zoo:drafter": 0.4},
        "plain": {"zoo": 0.6},
    }
    speeds = {"alternate": [1.5, 1.4, 1.6], "naive": [2.0, 1.9, 2.1], "plain": [1.55, 1.45, 1.65]}
    theory = {"c": 0.1, "proposer": 1}
    where: dict[str, Any] = {"batch": 1, "temperature": 0.0, "over_standard": speeds}
    rows = [where | {"domain": domain, "calls_per_token": calls, "theory": theory} for domain in ("code", "math")]
    rows.append(where | {"domain": "all"})
    found = room.collaborations.Collaborations({"settings": {SMALL: rows}}, SMALL)
    naive = found.loss("naive", 0.0, 1)
    assert "0.75 times the speed" in naive and "have 0.73 and 0.73 times" in naive, "0.44 calls over 0.6"
    inverse = [row | {"theory": {"c": 10.0, "proposer": 0}} if "theory" in row else row for row in rows]
    assert room.collaborations.Collaborations({"settings": {SMALL: inverse}}, SMALL).loss("naive", 0.0, 1) == naive
    assert "have 0.53 and 0.53 times" in found.loss("naive", 0.0, 2), "models of one size cost the same"
    assert "no clear difference" in found.loss("plain", 0.0, 1)
    speeds["plain"] = [2.0, 1.9, 2.1]
    assert "not known" in found.loss("plain", 0.0, 1), "the calls of its drafter are not counted"
    calls["plain"] = {"zoo": 0.5, "zoo:drafter": 0.5, "drafter": 1.0}
    assert "have 1.08 and 1.08 times" in found.loss("plain", 0.0, 1), "0.65 calls over 0.6"
    assert "have 1.33 and 1.33 times" in found.loss("plain", 0.0, 2), "2 calls of one size over 1.5"
    speeds["naive"] = [1.4, 1.3, 1.5]
    assert found.loss("naive", 0.0, 1) == ""


def test_groups_of_requests_have_no_interval_and_a_loss_together_its_reason(room: Room) -> None:
    speeds = {"alternate": [0.9, 0.85, 0.95]}
    theory = {"c": 0.1, "proposer": 1}

    def found(big: float) -> Any:
        where: dict[str, Any] = {"batch": 8, "temperature": 0.0, "over_standard": speeds}
        calls = {"alternate": {"zoo": big, "zoo:drafter": 1.0}}
        rows = [where | {"domain": domain, "calls_per_token": calls, "theory": theory} for domain in ("code", "math")]
        return room.collaborations.Collaborations({"settings": {SMALL: [*rows, where | {"domain": "all"}]}}, SMALL)

    said = found(1.2).over_standard("alternate", 0.0, 8)
    assert "code 0.90× [0.85 and 0.95]" in said and "all 0.90× (0.85 to 0.95)" in said
    assert "have 0.85 and 0.85" in found(1.2).slower_together(0.0, 1), "1.1 calls over 1.3"
    assert "lengths loses" in found(1.2).slower_together(0.0, 1) and "lengths" not in found(0.5).slower_together(0.0, 1)
    speeds["alternate"] = [1.1, 1.0, 1.2]
    assert found(1.2).slower_together(0.0, 1) == ""


def test_tokens_a_traversal_belong_to_the_time_of_a_token(room: Room) -> None:
    """Runs of 2 and of 8 tokens a traversal: 3.2 tokens, not the mean of 5, and then the equation has no error."""
    pipeline = room.dsd_pipeline
    nodes = pipeline.Nodes.stored({"count": 3, "t0": 0.03, "window": 0.04, "draft": 0.001})
    assert nodes.links == 2
    seconds = nodes.window + pipeline.WINDOW * nodes.draft + nodes.links * 0.01
    way = {"rounds": (1 / 2 + 1 / 8) / 2, "token": (seconds / 2 + seconds / 8) / 2}
    assert pipeline.kept(way) == pytest.approx(3.2)
    assert nodes.equations(0.01, pipeline.kept(way))["window_corrected"] == pytest.approx(way["token"])
    assert nodes.equations(0.01, 5.0)["window_corrected"] < 0.7 * way["token"]


def test_long_runs_at_the_slowest_links_have_rows_of_their_own(room: Room) -> None:
    def way(token: float, rounds: float) -> dict[str, float]:
        return {"token": token, "rounds": rounds, "depth": 8.0}

    nodes = {"count": 4, "t0": 0.04, "window": 0.04, "draft": 0.001, "links": 3}
    measured = {"off": way(0.76, 1.0), "fixed": way(0.19, 0.25), "goodput": way(0.2, 0.3)}
    pipeline = {"nodes": nodes, "rows": [{"ratio": 24.0, "t1": 0.24, "measured": measured}]}

    def ours(ratio: int) -> str:
        found = rows(room.page("dsd"))
        (row,) = [
            row for row in found if row.run.command.endswith(name) and row.what == f"Speedup, {of} {ratio} t₀ / N"
        ]
        return str(row.ours)

    name, of = "dsd_regime_long", "N = 4, t₁ ="
    assert ours(24) == ours(32) == "not run"
    command = f"python -m benchmarks.dsd --name {name}"
    room.store(name, {"command": command, "machine": MACHINE, "pipelines": [pipeline]})
    assert ours(24).startswith("4.00× (") and "4.00 tokens a traversal" in ours(24)
    assert ours(32) == "not run"


def test_a_command_without_stored_options_is_the_sources_own(room: Room) -> None:
    source = room.sources.Source("card", "cospec train evaluate --out runs/zoo")
    assert room.sources.run_of({"machine": MACHINE}, source).command == source.command
    stored = {"machine": MACHINE, "options": {"out": "elsewhere"}}
    assert room.sources.run_of(stored, source).command == "cospec train evaluate --out elsewhere"


def test_one_thread_is_no_threads(room: Room) -> None:
    assert room.sources.machine_words({"processor": "Chip", "threads": 1, "cores": 2}) == "Chip, 1 thread, 2 cores"


def test_one_configuration_counts_once_among_bounds(room: Room) -> None:
    def row(bound: float, fit: float, speed: float) -> dict[str, Any]:
        loss = {"low": -0.1 if fit < 0.2 else 0.1}
        return {
            "max_divergence": bound,
            "options": {"fit": fit},
            "divergence": fit,
            "loss": loss,
            "speed": {"ratio": speed},
        }

    found = {
        "rows": [row(0.0, 0.0, 2.0), row(0.1, 0.1, 1.1), row(0.2, 0.2, 1.2), row(0.4, 0.2, 1.3)],
        "tolerance": 0.02,
    }
    fastest = room.comparisons.fastest_relaxed
    assert fastest(found)["max_divergence"] == 0.2 and fastest(found, lossless=True)["max_divergence"] == 0.1
    assert "Bounds 0.2 and 0.4 have one fit" in room.dsd.same_fits(found)


def test_a_digest_names_no_kernels(room: Room) -> None:
    words = room.sources.machine_words
    assert words({"device": "Chip", "kernels": "0123456789abcdef"}) == "Chip"
    assert words({"device": "Chip", "kernels": "avx512_bf16"}) == "Chip, kernels avx512_bf16"


def test_equations_as_printed_and_corrected(room: Room) -> None:
    figures, nodes = room.smartspec_figures, room.dsd_nodes
    assert figures.printed_equation_10(0.7, (3, 2, 2)) == pytest.approx(4.60, abs=0.005)
    assert figures.printed_equation_8(0.7, 2) == pytest.approx(1 + 0.7 + 0.49)
    assert figures.accepted_over_proposed(0.7, 5) == pytest.approx(0.39, abs=0.005)
    best = [figures.best_length(batch) for batch in (1, 32, 256)]
    assert best == sorted(best, reverse=True) and best[0] >= 3 and best[-1] <= 1
    assert figures.best_length(256, 0.5) == 0
    links = nodes.Links(8, 3.0)
    assert nodes.communication_reduction(links, 4.0) == pytest.approx(21 * 3 / (4 * 22))
    assert nodes.printed_speedup(links, 4.0, 8) == pytest.approx(22 / (9 / 4 + 21 / 4))
    assert nodes.communication_reduction(links, 1.0) == 0


def test_figures_compared_with_a_formula_are_drawn(room: Room) -> None:
    """What an equation gives is compared with draws, not with the equation again."""
    assert room.cos_theory.least_acceptance(0.3, draws=2000) == pytest.approx(0.3, abs=0.005)
    chance = np.random.default_rng(1)
    words = room.smartspec_figures.drawn_rates(chance, 0.7, 5, draws=20_000)
    assert [float(number) for number in re.findall(r"\d\.\d+", words)] == pytest.approx([0.39, 0.70], abs=0.02)


def test_the_pipeline_of_nodes_takes_what_equation_3_says(room: Room) -> None:
    links = room.dsd_nodes.Links(4, 3.0)
    runs = room.dsd_nodes.simulate(room.dsd_nodes.scenario(links, 2))["runs"]
    off = next(run for run in runs if run["variant"] == "off")
    assert off["tpot"]["mean"] == pytest.approx(0.02 * (1 + links.crossing), rel=1e-6)


def test_every_paper_has_a_command(room: Room) -> None:
    assert set(room.command.PAPERS) == set(NAMES)


def test_another_figure_gives_another_document(room: Room) -> None:
    page = room.page("dsd")
    first = page.sections[0]
    row = replace(first.rows[0], ours="9.99×")
    edited = replace(page, sections=(replace(first, rows=(row, *first.rows[1:])), *page.sections[1:]))
    assert room.render.document([edited]) != room.render.document([page])
