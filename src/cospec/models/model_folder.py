"""Finds the folder of a model and checks its files, before large libraries are imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cospec.errors import ModelError
from cospec.models.files.gguf_as_folder import gguf_folder, is_gguf, linked_file, one_gguf, parts

ZOO = Path(__file__).resolve().parent.parent / "zoo"
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?(:[\w.-]+)?")
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Files that describe a quantization outside config.json.
_QUANTIZED = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_ALLOWED = (
    "zoo, zoo:NAME, a folder with safetensors weights and config.json or adapter_config.json, a GGUF file, "
    "or the name of a model on the hub, with :PART for the GGUF file with PART in the name"
)


def zoo_members() -> list[str]:
    """Return the names of the models in the package."""
    found = [*ZOO.glob("*/config.json"), *ZOO.glob("*/adapter_config.json")]
    return sorted({path.parent.name for path in found})


def in_zoo(name: str) -> bool:
    """Whether ``name`` means a model of the package."""
    return name.partition(":")[0] == "zoo"


def resolve(name: str) -> Path:
    """Return the folder of the model ``name``: from the zoo, the disk or the hub, downloaded if necessary.

    Raises:
        ModelError: no such model exists.
    """
    if in_zoo(name):
        return _zoo(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _whole(path.resolve())
    if path.is_file() and path.suffix == ".gguf":
        return gguf_folder(path)
    if path.exists() or not _HUB_NAME.fullmatch(name):
        raise ModelError(f"model is {name!r}, which is not an existing folder; allowed is {_ALLOWED} ({_members()}).")
    return _hub(name)


def _whole(folder: Path, choice: str = "") -> Path:
    """Return ``folder``, or the folder that describes the GGUF file in ``folder``."""
    if is_gguf(folder) or any(folder.glob("*.safetensors")):
        return folder
    file = one_gguf(folder, choice)
    return folder if file is None else gguf_folder(file)


def _zoo(name: str) -> Path:
    member = name.partition(":")[2] or "target"
    if member not in zoo_members():
        raise ModelError(f"model is {name!r}, which is not in the zoo; allowed is {_ALLOWED} ({_members()}).")
    return ZOO / member


def _members() -> str:
    return "the zoo has " + (", ".join(f"zoo:{member}" for member in zoo_members()) or "no members")


def _hub(name: str) -> Path:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    missing = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError)
    try:
        return _fetched(name, *_from_hub(name, offline=True))
    except (*missing, ModelError):
        pass
    try:
        return _fetched(name, *_from_hub(name, offline=False))
    except missing as error:
        kind = type(error).__name__
        raise ModelError(
            f"model is {name!r}, which is neither a folder nor could be fetched from the hub ({kind}); "
            f"allowed is {_ALLOWED} ({_members()})."
        ) from None


def _from_hub(name: str, offline: bool) -> tuple[Path, str]:
    """Return the folder of the files of a hub name, and the choice between GGUF files."""
    from huggingface_hub import snapshot_download

    repository, _, choice = name.partition(":")
    if not choice:
        folder = Path(snapshot_download(repository, allow_patterns=_HUB_FILES, local_files_only=offline))
        if offline or any(folder.glob("*.safetensors")):
            return folder, choice
        choice = _one_gguf_of(repository)
        if not choice:
            return folder, choice
    patterns = [f"*{each}*" for each in {choice, choice.lower(), choice.upper()}]
    return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=offline)), choice


def _one_gguf_of(repository: str) -> str:
    """Return the name of the only GGUF file of a hub repository without safetensors; empty without GGUF files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        names = HfApi().list_repo_files(repository)
    except Exception as error:  # the errors of the hub's HTTP library, which the hub's releases change
        raise LocalEntryNotFoundError(str(error)) from error
    packed = [file for file in names if file.endswith(".gguf")]
    whole = [file for file in packed if "-of-" not in file or "-00001-of-" in file]
    if len(whole) > 1:
        found = ", ".join(whole)
        raise ModelError(
            f"The model {repository} has several GGUF files; choose by {repository}:PART of a name: {found}."
        )
    return Path(whole[0]).name.partition("-00001-of-")[0] if whole else ""


def _fetched(name: str, folder: Path, choice: str) -> Path:
    """Return the folder of a fetched model, described if the model is a GGUF file."""
    found = _whole(folder, choice)
    described = any((found / file).exists() for file in ("config.json", "adapter_config.json"))
    if not described or not (is_gguf(found) or any(found.glob("*.safetensors"))):
        raise ModelError(f"The model {name} on the hub has no safetensors or GGUF weights with a configuration.")
    missing = _missing(found)
    if missing is not None:
        raise ModelError(
            f"The model {name} from the hub is not complete: {missing} is missing; "
            "a start with a network resumes the download."
        )
    return found


def _missing(folder: Path) -> str | None:
    """Return the name of a weight file that an interrupted download lacks."""
    if is_gguf(folder):
        return None  # its description needs all parts
    shards = any(_SHARD.search(file.name) for file in folder.glob("*.safetensors"))
    if shards and not (folder / INDEX).exists():
        return INDEX
    return next((name for name in _indexed(folder) if not (folder / name).exists()), None)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Raises:
        ModelError: the file is missing, or holds no JSON object.
    """
    try:
        return read_object(folder / "config.json")
    except OSError:
        raise ModelError(f"The folder {folder} is not a model: it has no readable config.json.") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model's folder.

    Raises:
        OSError: the file is unreadable.
        ModelError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"The file {path} is not a model's configuration: it does not hold a JSON object.")
    return found


def check_stored(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with another location of the weights.

    Raises:
        ModelError: the weights are elsewhere.
    """
    named = config.get("transformers_weights")
    if named is not None:
        raise ModelError(
            f"The model {name} sets the location of its weights ({named!r}); allowed is model.safetensors."
        )


def quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization of a folder's safetensors with the key ``quant_method``; None of floating weights."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None:
                return part[key] if isinstance(part[key], dict) else {}
    for file, method in _QUANTIZED.items():
        if (folder / file).exists():
            return {"quant_method": method} | read_object(folder / file)
    return None


def configurations(folder: Path) -> list[Path]:
    """Return the files of a model's folder that say how its weights are read."""
    return [folder / name for name in ("config.json", *_QUANTIZED) if (folder / name).exists()]


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, each safetensors file checked to be readable and complete.

    Raises:
        ModelError: a file is missing or corrupt, or no file exists.
    """
    if is_gguf(folder):
        return parts(linked_file(folder))
    names = _indexed(folder) or ["model.safetensors"]
    if not (folder / INDEX).exists() and not (folder / names[0]).exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        found = "weights in a format that can run code (.bin or .pt)" if pickled else "no weights"
        raise ModelError(f"The folder {folder} has {found}; allowed are safetensors weights (model.safetensors).")
    files = [folder / name for name in names]
    for file in files:
        try:
            with safe_open(str(file), framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"The weights {file} cannot be read as safetensors: {error}.") from None
    return files


def _indexed(folder: Path) -> list[str]:
    """Return the names in a folder's index of weight files; none without an index."""
    index = folder / INDEX
    if not index.exists():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"The file {index} is not an index of safetensors files.") from None
    _check_names(index, names)
    return names


def _check_names(index: Path, names: list[Any]) -> None:
    """Refuse an index that names a file outside the model's folder. A link inside the folder may point anywhere."""
    for name in names:
        inside = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
        if not inside:
            raise ModelError(f"The index {index} names {name!r}; allowed are names of files in the same folder.")
