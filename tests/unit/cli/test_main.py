"""The command itself: help, versions, wrong usage, the zoo's list, and what ``serve`` passes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import Result

import cospec
import cospec.server.run
from cospec.cli.models import members, parameters
from cospec.config import EngineConfig
from cospec.server.settings import ServerSettings

Command = Callable[..., Result]

Calls = list[tuple[EngineConfig, ServerSettings]]


def test_help_and_version(cospec_command: Command) -> None:
    result = cospec_command("--help")
    assert result.exit_code == 0
    for name in ("serve", "generate", "chat", "models", "train"):
        assert name in result.output
    assert cospec_command("--version").output.strip() == cospec.__version__


@pytest.mark.parametrize("arguments", [["nope"], ["serve", "--nope"], ["generate"]])
def test_wrong_usage_exits_with_two(cospec_command: Command, arguments: list[str]) -> None:
    assert cospec_command(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nope"], "'nope' is no command; allowed is one of serve, generate, chat"),
        (["bench", "speed"], "'speed' is no command; allowed is one of latency, serve, compare"),
        (["serve", "--stage-timeout", "3"], "stage_timeout is a key of LLM(...) and of `cospec serve --config FILE`."),
        (["generate", "--min-p=0.1"], "--min-p is no option of this command; min_p is a key of --sampling-params."),
    ],
)
def test_wrong_usage_names_what_is_allowed(cospec_command: Command, arguments: list[str], sentence: str) -> None:
    result = cospec_command(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_unknown_names_are_refused_without_torch() -> None:
    code = (
        "import sys\n"
        "from cospec import LLM\n"
        "from cospec.errors import InvalidInput\n"
        "try:\n"
        "    LLM(speculative_config={'method': 'x'})\n"
        "except InvalidInput as error:\n"
        "    print('torch' in sys.modules, error.field)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False speculative_config.method"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import cospec.cli.main\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "cospec", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cospec.__version__


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What ``serve`` would run."""
    calls: Calls = []
    monkeypatch.setattr(cospec.server.run, "run", lambda config, settings, announce: calls.append((config, settings)))
    return calls


@pytest.fixture
def key_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API key in the environment."""
    monkeypatch.setenv("COSPEC_API_KEY", "environment")


def test_serve_passes_options_on(cospec_command: Command, served: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSPEC_API_KEY", "from the environment")
    result = cospec_command(
        "serve", "some/model", "--port", 0, "--host", "0.0.0.0", "--max-num-seqs", 3, "--no-enable-prefix-caching",
        "--speculative-config", '{"method": "ngram", "prompt_lookup_max": 3}', "--served-model-name", "mine",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    ((config, settings),) = served
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("some/model", 3, False)
    assert config.served_model_name == "mine"
    assert config.speculative_config is not None and config.speculative_config.options == {"prompt_lookup_max": 3}
    assert (settings.port, settings.host, settings.api_key) == (0, "0.0.0.0", ("from the environment",))


@pytest.mark.parametrize(
    ("line", "file", "keys"),
    [
        ([], "{}", ["environment"]),
        ([], "api_key: [file, other]", ["file", "other"]),
        ([], "api-key: [file]", ["file"]),
        (["--api-key", "line"], "api_key: [file]", ["line"]),
    ],
)
@pytest.mark.usefixtures("key_of_environment")
def test_the_key_of_the_environment_replaces_no_other(
    cospec_command: Command, served: Calls, tmp_path: Path, line: list[str], file: str, keys: list[str]
) -> None:
    (tmp_path / "c.yaml").write_text(file)
    assert cospec_command("serve", *line, "--config", tmp_path / "c.yaml").exit_code == 0
    ((_, settings),) = served
    assert list(settings.api_key) == keys


def test_names_of_plugins_are_checked_where_the_modules_are_imported(cospec_command: Command, served: Calls) -> None:
    own = ["--plugin", "mine", "--speculative-config", '{"method": "mine"}']
    assert cospec_command("serve", *own).exit_code == 0
    ((config, _),) = served
    assert config.speculative_config is not None and config.speculative_config.method == "mine"


def test_serve_defaults(cospec_command: Command, served: Calls) -> None:
    assert cospec_command("serve").exit_code == 0
    ((config, settings),) = served
    assert config == EngineConfig()
    assert settings == ServerSettings()


def test_command_line_wins_over_file(cospec_command: Command, served: Calls, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: a\nport: 9\nmax-num-seqs: 2\nspeculative_config: {method: 'off'}\n")
    assert cospec_command("serve", "b", "--config", file, "--max-num-seqs", 5).exit_code == 0
    ((config, settings),) = served
    assert (config.model, config.max_num_seqs, settings.port) == ("b", 5, 9)
    assert config.speculative_config is not None and config.speculative_config.method == "off"


@pytest.mark.parametrize(
    ("file", "line", "models"),
    [
        ("models: [a, b]", ["c"], None),
        ("model: a", ["--model", "b", "--model", "c", "--ensemble", '{"method": "single"}'], ["b", "c"]),
    ],
)
def test_models_of_the_command_line_win_however_many(
    cospec_command: Command, served: Calls, tmp_path: Path, file: str, line: list[str], models: list[str] | None
) -> None:
    (tmp_path / "c.yaml").write_text(file)
    assert cospec_command("serve", *line, "--config", tmp_path / "c.yaml").exit_code == 0
    ((config, _),) = served
    assert config.model == (models[0] if models else "c")
    assert [member.model for member in config.models or ()] == (models or [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--collaboration", '{"gamma": 2}'], "collaboration is given for one model"),
        (["--port", "70000"], "port is 70000"),
        (["--drain-timeout", "-1"], "drain_timeout is -1.0"),
        (["--log-level", "loud"], "log_level is 'loud'"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--speculative-config", "[]"], "speculative_config is '[]'"),
        (["--speculative-config", '{"num_speculative_tokens": "x"}'], "speculative_config.num_speculative_tokens"),
        (
            ["--speculative-config", '{"method": "x"}'],
            "speculative_config.method is 'x'; allowed is one of draft_model",
        ),
        (["--quantization", "q9"], "quantization is 'q9'; allowed is on a CPU one of int8, q8_0"),
        (["--speculative-config", '{"policy": "x"}'], "speculative_config.policy is 'x'"),
        (["--speculative-config", '{"acceptance_method": "x"}'], "speculative_config.acceptance_method is 'x'"),
        (["--speculative-config", '{"execution_mode": "x"}'], "speculative_config.execution_mode is 'x'"),
        (["--speculative-config", '{"drafter_executor": "x"}'], "speculative_config.drafter_executor is 'x'"),
        (["--config", "/does/not/exist"], "config is '/does/not/exist'"),
    ],
)
def test_serve_tells_what_is_wrong_in_one_sentence(
    cospec_command: Command, served: Calls, arguments: list[str], expected: str
) -> None:
    result = cospec_command("serve", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("cospec: ")
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert served == []


def test_an_unknown_key_of_a_file_names_the_keys_of_server_and_engine(
    cospec_command: Command, served: Calls, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("portt: 8711")
    result = cospec_command("serve", "--config", tmp_path / "c.yaml")
    assert result.exit_code == 1 and served == []
    assert result.stderr.startswith("cospec: key portt is 8711; allowed is one of ")
    assert {"port", "api_key", "max_num_seqs"} <= set(result.stderr.rstrip(".\n").replace(",", "").split())


@pytest.mark.parametrize("given", [["--api-key", ""], ["--api-key", "a", "--api-key", ""], ["--api-key", " "], []])
def test_an_empty_key_does_not_start(
    cospec_command: Command, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    if not given:
        monkeypatch.setenv("COSPEC_API_KEY", "")
    monkeypatch.setattr(cospec.server.run, "bind", lambda *_: pytest.fail("the server started"))
    result = cospec_command("serve", *given)
    assert result.exit_code == 1
    assert "api_key" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_unknown_key_in_file(cospec_command: Command, served: Calls, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"modle": "a"}')
    result = cospec_command("serve", "--config", file)
    assert (result.exit_code, served) == (1, [])
    assert "modle" in result.stderr


def test_models_are_counted_from_their_weights(tmp_path: Path) -> None:
    for name, width in (("drafter", 2), ("target", 3)):
        folder = tmp_path / name
        folder.mkdir()
        shape = {"num_hidden_layers": 1, "hidden_size": width, "vocab_size": 10, "max_position_embeddings": 64}
        (folder / "config.json").write_text(json.dumps(shape))
        weights = {"a": np.zeros((500_000, width), np.float16), "b": np.zeros(7, np.float16)}
        save_file(weights, folder / "model.safetensors")
    (tmp_path / "card.json").write_text(json.dumps({"members": {"target": {"tokens": 6_000_000}}}))
    assert parameters(tmp_path / "target") == 1_500_007
    first, second = members(tmp_path)
    assert first[0] == "zoo:target"
    assert first[2:] == ("1.5M", "1", "3", "10", "64", "6.0M")
    assert second[0] == "zoo:drafter"
    assert second[-1] == "-"


def test_every_member_is_listed_by_its_whole_name(cospec_command: Command) -> None:
    from cospec.models.model_folder import ZOO

    if not (ZOO / "target" / "config.json").exists():
        pytest.skip("the zoo's weights are not installed")
    out = cospec_command("models").output
    for folder in ("target", "drafter", "code", "math", "prose", "target-prose", "target-code", "heads"):
        assert f"zoo:{folder} " in out


def test_models_command(cospec_command: Command) -> None:
    result = cospec_command("models")
    assert result.exit_code == 0
    assert "zoo" in result.output.lower()
