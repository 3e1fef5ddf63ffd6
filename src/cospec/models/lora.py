"""Low-rank adapters in the PEFT library's folder format: read, checked, and merged into a model's weights.

A LoRA folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. For chosen linear layers the file has
matrices ``A [r, in]`` and ``B [out, r]``; the layer's weight is ``W + scale * B @ A`` (Hu et al. 2021, 2106.09685). A
merged adapter costs nothing at run time and works with every back end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from cospec.errors import ModelError
from cospec.models.files.source import text_name
from cospec.models.model_folder import resolve
from cospec.models.part_source import PartSource

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# Initialisations that leave the base unchanged. Others, such as pissa, move a part of its weights into the adapter.
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_UNUSED = ("use_dora", "modules_to_save", "layer_replication", "alora_invocation_tokens", "target_parameters")


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of ``adapter_config.json``.

    Attributes:
        base: name or path of the adapter's base model; a relative path starts at ``folder``.
        alpha: numerator of the scale; ``alphas`` has exceptions by module name.
        rooted: the scale is ``alpha / sqrt(r)`` instead of ``alpha / r`` (rank-stabilised LoRA, 2312.03732).
        transposed: the layers hold ``[in, out]``, as in GPT-2.
    """

    folder: Path
    base: str
    alpha: float
    alphas: Mapping[str, float]
    rooted: bool
    transposed: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of ``B @ A`` in ``module``."""
        found = (a for key, a in self.alphas.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no weights of its own."""
    own = any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json"))
    return (folder / CONFIG).exists() and not own


def base_folder(folder: Path) -> Path:
    """Return the folder of an adapter's base model; ``folder`` if it holds no adapter.

    Raises:
        ModelError: the base is missing, or is an adapter too.
    """
    if not is_adapter(folder):
        return folder
    name = read_adapter(folder).base
    try:
        base = (folder / name).resolve() if (folder / name).is_dir() else resolve(name)
    except ModelError as error:
        raise ModelError(f"The base of the adapter {folder} cannot be found: {error}") from None
    if is_adapter(base):
        raise ModelError(f"The base of the adapter {folder} is {base}, an adapter too; allowed is a whole model.")
    return base


def read_adapter(folder: Path) -> AdapterFolder:
    """Read an adapter's configuration.

    Raises:
        ModelError: the file is no JSON object, is no LoRA adapter, or cannot be merged.
    """
    path = folder / CONFIG
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        given = None
    if not isinstance(given, dict):
        raise ModelError(f"The file {path} is not an adapter's configuration: it does not hold a JSON object.")
    kind = given.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"The adapter {folder} has the peft_type {kind!r}; allowed is 'LORA'.")
    _check_options(folder, given)
    base = given.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"The file {path} does not name the base of the adapter in base_model_name_or_path.")
    try:
        return AdapterFolder(
            folder=folder,
            base=base,
            alpha=float(given["lora_alpha"]),
            alphas={str(key): float(alpha) for key, alpha in (given.get("alpha_pattern") or {}).items()},
            rooted=bool(given.get("use_rslora")),
            transposed=bool(given.get("fan_in_fan_out")),
        )
    except KeyError as error:
        raise ModelError(f"The file {path} lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, AttributeError):
        raise ModelError(f"The file {path} has a lora_alpha or alpha_pattern that is not made of numbers.") from None


def _check_options(folder: Path, given: Mapping[str, Any]) -> None:
    for name in _UNUSED:
        if given.get(name):
            raise ModelError(f"The adapter {folder} sets {name} to {given[name]!r}; allowed is none.")
    if given.get("bias", "none") != "none":
        raise ModelError(f"The adapter {folder} sets bias to {given['bias']!r}; allowed is 'none'.")
    start = given.get("init_lora_weights", True)
    if start not in _STARTS:
        raise ModelError(
            f"The adapter {folder} sets init_lora_weights to {start!r}, which changes the base; allowed are "
            f"{', '.join(map(repr, _STARTS))}."
        )


def merge(model: nn.Module, adapter: AdapterFolder, part: PartSource | None = None) -> None:
    """Add an adapter to the weights of its base model in place, in float32.

    Args:
        part: of the base that ``model`` is; None for the whole base.

    Raises:
        ModelError: the weights are unreadable, no LoRA weights, or do not fit the model.
    """
    import torch

    config: Any = model.config
    writes_text = False
    for module, (a, b) in _factors(adapter).items():
        rank = a.shape[0]
        if a.ndim != 2 or b.ndim != 2 or b.shape[1] != rank:
            raise _misfit(
                adapter, f"has factors {_sizes(b)} and {_sizes(a)} for {module}, which are no matrices to join"
            )
        update = adapter.scale(module, rank) * (b.float() @ a.float())
        update = update.T if adapter.transposed else update
        name = text_name(module) if config.model_type == "gemma3_text" else module
        writes_text = writes_text or name is not None
        if part is not None and name is not None:
            name, update = part.own_update(name, update)
        if name is None:
            continue
        try:
            weight = model.get_submodule(name).weight
        except AttributeError:
            raise _misfit(adapter, f"holds weights for {module}, which its base lacks") from None
        if not isinstance(weight, torch.Tensor):
            raise _misfit(adapter, f"holds weights for {module}, which has no matrix")
        if update.shape != weight.shape:
            raise _misfit(adapter, f"has an update {_sizes(update)} for {module}, whose weight is {_sizes(weight)}")
        with torch.no_grad():
            weight.copy_((weight.float() + update.to(weight.device)).to(weight.dtype))
    if not writes_text:
        raise _misfit(adapter, "holds weights of no module that writes text")


def _factors(adapter: AdapterFolder) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``A [r, in]`` and ``B [out, r]`` by module."""
    from safetensors.torch import load_file

    path = adapter.folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The adapter weights {path} cannot be read as safetensors: {error}.") from None
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            raise _misfit(adapter, f"holds {name}, which is no LoRA factor of a linear layer")
        sides.setdefault(found["module"], {})[found["side"]] = tensor
    for module, pair in sides.items():
        if len(pair) < 2:
            raise _misfit(adapter, f"has one factor of two for {module}")
    if not sides:
        raise _misfit(adapter, "holds no tensors")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _misfit(adapter: AdapterFolder, what: str) -> ModelError:
    return ModelError(f"The adapter {adapter.folder} {what}.")


def _sizes(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
