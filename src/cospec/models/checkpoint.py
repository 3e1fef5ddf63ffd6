"""Finds the folder of a model and checks its files, before large libraries are imported."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cospec.errors import ModelError

ZOO = Path(__file__).resolve().parent.parent / "zoo"
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = "allowed are float32, bfloat16 and float16 weights in safetensors files"
# Files that describe a quantization outside config.json.
_QUANTIZED = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_BITSANDBYTES = {"load_in_4bit": 4, "load_in_8bit": 8}
_ALLOWED = (
    "zoo, zoo:NAME, a folder with safetensors weights and config.json or adapter_config.json, "
    "or the name of a model on the hub"
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
        return path.resolve()
    if path.is_file() and path.suffix == ".gguf":
        raise ModelError(f"The file {path} is a GGUF model, whose weights are quantized or packed; {_WEIGHTS}.")
    if path.exists() or not _HUB_NAME.fullmatch(name):
        raise ModelError(f"model is {name!r}, which is not an existing folder; allowed is {_ALLOWED} ({_members()}).")
    return _hub(name)


def _zoo(name: str) -> Path:
    member = name.partition(":")[2] or "target"
    if member not in zoo_members():
        raise ModelError(f"model is {name!r}, which is not in the zoo; allowed is {_ALLOWED} ({_members()}).")
    return ZOO / member


def _members() -> str:
    return "the zoo has " + (", ".join(f"zoo:{member}" for member in zoo_members()) or "no members")


def _hub(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        found = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        described = any((found / name).exists() for name in ("config.json", "adapter_config.json"))
        if described and any(found.glob("*.safetensors")):
            return found
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        kind = type(error).__name__
        raise ModelError(
            f"model is {name!r}, which is neither a folder nor could be fetched from the hub ({kind}); "
            f"allowed is {_ALLOWED} ({_members()})."
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Raises:
        ModelError: the file is missing, or holds no JSON object.
    """
    try:
        return read_object(folder / "config.json")
    except OSError:
        _refuse_gguf(folder)
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


def check_stored(name: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration with quantized weights or with another location of the weights.

    Raises:
        ModelError: the weights are quantized or elsewhere.
    """
    named = config.get("transformers_weights")
    if named is not None:
        raise ModelError(
            f"The model {name} sets the location of its weights ({named!r}); allowed is model.safetensors."
        )
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None:
                raise ModelError(_quantized(name, part[key]))
    for file, method in _QUANTIZED.items():
        if (folder / file).exists():
            raise ModelError(_quantized(name, {"quant_method": method}))


def _quantized(name: str, found: Any) -> str:
    """Return the error about a quantization's configuration."""
    about = found if isinstance(found, dict) else {}
    method = about.get("quant_method") or about.get("quant_algo") or "an unnamed method"
    width = next((about[key] for key in ("bits", "w_bit") if isinstance(about.get(key), int)), None)
    width = width or next((bits for key, bits in _BITSANDBYTES.items() if about.get(key) is True), None)
    shown = f"{method}, {width} bits" if width else str(method)
    return f"The model {name} is stored quantized ({shown}); {_WEIGHTS}, and quantization: int8 makes them small here."


def _refuse_gguf(folder: Path) -> None:
    """Raise ``ModelError`` for a folder with GGUF weights."""
    file = next(iter(sorted(folder.glob("*.gguf"))), None)
    if file is not None:
        raise ModelError(f"The folder {folder} has GGUF weights ({file.name}), quantized or packed; {_WEIGHTS}.")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, each checked to be readable and complete.

    Raises:
        ModelError: a file is missing or corrupt, or no file exists.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"The file {index} is not an index of safetensors files.") from None
        _check_names(index, names)
    elif not (folder / names[0]).exists():
        _refuse_gguf(folder)
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


def _check_names(index: Path, names: list[Any]) -> None:
    """Refuse an index that names a file outside the model's folder. A link inside the folder may point anywhere."""
    for name in names:
        inside = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
        if not inside:
            raise ModelError(f"The index {index} names {name!r}; allowed are names of files in the same folder.")


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of a model's weight files.

    Attributes:
        dtype: the most frequent floating dtype of the tensors, in safetensors' names: ``F32``, ``BF16`` or ``F16``.
        shapes: of all tensors.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(map(math.prod, self.shapes))


def stored(files: list[Path]) -> Stored:
    """Read the headers of the files."""
    counts: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    for file in files:
        with safe_open(str(file), framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the handle is not a mapping
                part = tensors.get_slice(name)
                counts[str(part.get_dtype())] = counts.get(str(part.get_dtype()), 0) + 1
                shapes.append(tuple(part.get_shape()))
    floating = {dtype: count for dtype, count in counts.items() if dtype in ("F32", "BF16", "F16")}
    return Stored(max(floating, key=lambda dtype: floating[dtype], default="F32"), tuple(shapes))
