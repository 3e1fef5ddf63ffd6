"""Chooses the source of a model's weights from the files of its folder."""

from __future__ import annotations

from pathlib import Path

from cospec.models.files.gguf_as_folder import is_gguf
from cospec.models.files.gguf_source import GgufSource
from cospec.models.files.quantized_safetensors_source import QuantizedSafetensorsSource
from cospec.models.files.source import MULTIMODAL, SafetensorsSource, WeightSource
from cospec.models.model_folder import quantization, read_object, weight_files


def open_source(folder: Path) -> WeightSource:
    """Open the weights of a model's folder, see ``model_folder.resolve``.

    Raises:
        ModelError: a file is missing, unreadable or unsupported.
    """
    files = weight_files(folder)
    if is_gguf(folder):
        return GgufSource(files[0])
    file = folder / "config.json"
    config = read_object(file) if file.exists() else {}
    packed, kind = quantization(folder, config), config.get("model_type")
    if packed is None:
        return SafetensorsSource(files, kind in MULTIMODAL)
    return QuantizedSafetensorsSource(folder.name, files, packed, kind)
