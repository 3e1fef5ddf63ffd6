"""``cospec generate``: results, resumption, bad lines, interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cospec.cli.batch_io import ResultFile
from cospec.core.types import Event
from server.fake_engine import FakeLLM

Command = Callable[..., Result]

Files = tuple[Path, Path]


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> dict[object, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"


def test_rows(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"id": "a", "turns": ["xy"]}, {"prompt": "abc"})
    result = cospec_command("generate", "--prompts", prompts, "--output", output, "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    rows = read_lines(output)
    assert set(rows) == {"a", 2}
    assert set(rows["a"]) == {
        "id",
        "text",
        "token_ids",
        "finish_reason",
        "stats",
        "distribution",
        "exact",
        "divergence",
    }
    assert (rows["a"]["text"], rows[2]["text"]) == ("xyxy", "abca")
    assert len(rows["a"]["token_ids"]) == 4
    assert (rows["a"]["finish_reason"], rows["a"]["distribution"], rows["a"]["exact"]) == ("length", "target", True)
    assert rows["a"]["stats"]["mean_acceptance_length"] == 2.0
    assert rows["a"]["stats"]["accepted_by_drafter"] == {"fake": 2}


def test_options_reach_the_engine(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"prompt": "abc"})
    speculation = '{"method": "ngram", "num_speculative_tokens": 3}'
    arguments = ["--model", "m", "--speculative-config", speculation, "--batch", 5, "--threads", 1, "--seed", 3]
    assert cospec_command("generate", "--prompts", prompts, "--output", output, *arguments).exit_code == 0
    config = llm.made[0].engine.config
    assert (config.model, config.max_num_seqs, config.threads) == ("m", 5, 1)
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 3


def test_turns_are_a_conversation(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"id": 1, "turns": ["A", "B"]})
    assert cospec_command("generate", "--prompts", prompts, "--output", output, "--max-tokens", 30).exit_code == 0
    row = read_lines(output)[1]
    first = "u: A\na:" * 5
    assert row["answers"][0] == first[:30]
    assert row["answers"][1] == f"u: A\na: {first}"[:30] == row["text"]
    assert row["stats"]["target_calls"] == 32
    assert row["stats"]["e2e"] == 1.0
    assert row["stats"]["ttft"] == 0.25
    assert row["stats"]["model_calls"] == {"fake": 32}


def test_any_sampling_parameter(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    """By name, in JSON; separate options win."""
    prompts, output = files
    write_lines(prompts, {"id": 1, "prompt": "abc"})
    given = '{"max_tokens": 9, "min_p": 0.1, "stop": ["z"], "logprobs": 1, "prompt_logprobs": 0}'
    arguments = ["--sampling-params", given, "--max-tokens", 4]
    assert cospec_command("generate", "--prompts", prompts, "--output", output, *arguments).exit_code == 0
    row = read_lines(output)[1]
    assert len(row["token_ids"]) == len(row["logprobs"]) == 4
    assert set(row["logprobs"][0]) == {"token", "logprob", "rank", "top"}
    assert [entry is None for entry in row["prompt_logprobs"]] == [True, False, False]


def test_chat_puts_single_prompts_into_the_template(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"id": 1, "prompt": "A"})
    assert cospec_command("generate", "--prompts", prompts, "--output", output, "--chat").exit_code == 0
    assert read_lines(output)[1]["text"].startswith("u: A\na:")


def test_bad_lines_and_refused_prompts_do_not_stop_the_rest(
    llm: type[FakeLLM], cospec_command: Command, files: Files
) -> None:
    prompts, output = files
    write_lines(prompts, {"id": 1, "prompt": "a"}, "{oops", {"id": 3, "prompt": "x" * 300}, {"id": 4, "prompt": "b"})
    result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert result.exit_code == 1
    assert set(read_lines(output)) == {1, 4}
    assert "line 2: " in result.stderr
    assert "line 3: prompt is 300 tokens" in result.stderr
    assert "Traceback" not in result.output


def test_more_jobs_than_fit_into_the_engine_at_once(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, *({"prompt": "ab"} for _ in range(150)))
    assert cospec_command("generate", "--prompts", prompts, "--output", output, "--max-tokens", 2).exit_code == 0
    assert set(read_lines(output)) == set(range(1, 151))


def test_resumes(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"})
    output.write_text('{"id": 1, "text": "kept"}\n{"id": 2, "te')
    assert cospec_command("generate", "--prompts", prompts, "--output", output).exit_code == 0
    rows = read_lines(output)
    assert rows[1]["text"] == "kept"
    assert rows[2]["text"].startswith("bbbb")
    assert cospec_command("generate", "--prompts", prompts, "--output", output).exit_code == 0
    assert len(llm.made) == 1, "nothing was left to do, so no model is loaded"
    assert len(output.read_text().splitlines()) == 2


def test_interruption_keeps_what_is_done(
    llm: type[FakeLLM], cospec_command: Command, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output = files
    write_lines(prompts, *({"id": number, "prompt": "ab"} for number in range(100)))
    steps = iter(range(100))
    plain = llm.made

    from server.fake_engine import FakeEngine

    step = FakeEngine.step

    def interrupted(self: FakeEngine) -> list[Event]:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(FakeEngine, "step", interrupted)
    result = cospec_command("generate", "--prompts", prompts, "--output", output, "--max-tokens", 4)
    assert result.exit_code == 130
    assert "64 of 100" in result.stderr
    assert len(read_lines(output)) == 64
    assert not plain[0].engine.has_work
    monkeypatch.setattr(FakeEngine, "step", step)
    assert cospec_command("generate", "--prompts", prompts, "--output", output, "--max-tokens", 4).exit_code == 0
    assert set(read_lines(output)) == set(range(100))


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--temperature", "-1"], 1, "temperature is -1.0"),
        (["--speculative-config", "{"], 1, "speculative_config"),
        (["--speculative-config", '{"num_speculative_tokens": 999}'], 1, "num_speculative_tokens"),
        (["--sampling-params", '{"top_q": 1}'], 1, "sampling parameter is 'top_q'"),
        (["--sampling-params", '{"n": 2}'], 1, "n is 2"),
        (["--model", "missing"], 1, "model is 'missing'"),
        (["--dtype", "int4"], 1, "dtype is 'int4'"),
        (["--max-tokens", "many"], 2, "--max-tokens"),
        (["--nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_options_get_one_sentence(
    llm: type[FakeLLM], cospec_command: Command, files: Files, arguments: list[str], code: int, expected: str
) -> None:
    prompts, output = files
    write_lines(prompts, {"prompt": "a"})
    result = cospec_command("generate", "--prompts", prompts, "--output", output, *arguments)
    assert result.exit_code == code
    assert expected in result.stderr
    if code == 1:
        assert len(result.stderr.strip().splitlines()) == 1


def test_prompts_are_not_written_over(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    prompts.write_text('{"id": 1, "text": "mine", "prompt": "a"}')
    output.symlink_to(prompts)
    result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert (result.exit_code, "the file of the prompts" in result.stderr) == (1, True)
    assert prompts.read_text() == '{"id": 1, "text": "mine", "prompt": "a"}'


def test_missing_prompts(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert result.exit_code == 1
    assert result.stderr.startswith("cospec: prompts is ")
    assert not output.exists()


def test_a_run_without_work_says_why(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    prompts.write_text("")
    result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert (result.exit_code, result.stderr) == (0, f"{prompts}: nothing to do, the file has no prompts\n")
    write_lines(prompts, {"prompt": "abc"})
    assert cospec_command("generate", "--prompts", prompts, "--output", output).exit_code == 0
    result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert result.exit_code == 0
    assert result.stderr == f"{prompts}: nothing to do, {output} has all answers\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_one_sentence(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, _ = files
    write_lines(prompts, {"prompt": "abc"})
    result = cospec_command("generate", "--prompts", prompts, "--output", "/dev/full")
    assert result.exit_code == 1
    assert "output is '/dev/full'" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output
    assert not llm.made[0].engine.has_work


def test_two_runs_do_not_write_one_file(llm: type[FakeLLM], cospec_command: Command, files: Files) -> None:
    prompts, output = files
    write_lines(prompts, {"prompt": "abc"})
    with ResultFile(output):
        result = cospec_command("generate", "--prompts", prompts, "--output", output)
    assert result.exit_code == 1
    assert "which another run of this command writes" in result.stderr
    assert (llm.made, output.read_text()) == ([], "")
    assert cospec_command("generate", "--prompts", prompts, "--output", output).exit_code == 0
    assert len(output.read_text().splitlines()) == 1
