"""How messages become bytes: MessagePack, checked against the declared types.

The decoder builds data only: no message names code. Arrays travel as extensions ``(dtype, shape, buffer)``. The bytes
of an array follow the message as a buffer of their own, so no copy is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.errors import CospecError
from cospec.plugin_options import Options

DTYPES = frozenset({"<f2", "<f4", "<f8", "<i4", "<i8", "|u1", "|b1"})  # of arrays
ARRAY, TENSOR = 1, 2  # codes of extensions
DEVICES = ("cpu", "cuda")  # of tensors

Part = bytes | bytearray | memoryview
"""One piece of a message: the encoded struct first, then the bytes of each array."""


class ProtocolError(CospecError):
    """A peer speaks another version, or sent bytes that are no message."""


class Codec:
    """Encodes messages, and decodes the messages of one direction.

    Args:
        accepts: the type, or union of types, of the messages to be decoded.
    """

    def __init__(self, accepts: Any) -> None:
        self._outgoing: list[Part] = []
        self._incoming: Sequence[Part] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_other)
        self._decoder = msgspec.msgpack.Decoder(accepts, dec_hook=_decode_other, ext_hook=self._decode_extension)

    def encode(self, message: Any) -> list[Part]:
        """The parts of a message; array parts share the memory of the arrays.

        Raises:
            OverflowError, UnicodeEncodeError: a number has more than 64 bits, or a text is no Unicode text.
            TypeError: a value of a type that does not travel.
        """
        self._outgoing = []
        head = self._encoder.encode(message)
        return [head, *self._outgoing]

    def decode(self, parts: Sequence[Part]) -> Any:
        """The message of ``parts``; its arrays share the memory of the parts.

        Raises:
            ProtocolError: the parts are no message that this side accepts.
        """
        self._incoming = parts
        try:
            return self._decoder.decode(parts[0])
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"A message cannot be read: {error}.") from error
        finally:
            self._incoming = ()

    def _encode_other(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | DeviceProbs):
            value = np.asarray(value)
            return msgspec.msgpack.Ext(ARRAY, self._array(value))
        torch = sys.modules.get("torch")  # a process without torch has no tensors, and need not load torch
        if torch is not None and isinstance(value, torch.Tensor):
            values = value.detach().cpu().float().numpy()
            return msgspec.msgpack.Ext(TENSOR, self._array(values, str(value.device)))
        return _encode_value(value)

    def _array(self, values: NDArray[Any], device: str = "cpu") -> bytes:
        values = np.ascontiguousarray(values)
        if values.dtype.str not in DTYPES:
            raise TypeError(f"Arrays of dtype {values.dtype} do not travel.")
        self._outgoing.append(values.reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.encode((values.dtype.str, values.shape, len(self._outgoing), device))

    def _decode_extension(self, code: int, data: memoryview) -> Any:
        dtype, shape, number, device = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int, str])
        if dtype not in DTYPES or any(size < 0 for size in shape) or not 0 < number < len(self._incoming):
            raise ValueError(f"an array has dtype {dtype}, shape {shape} and buffer {number}")
        part, item = self._incoming[number], np.dtype(dtype)
        if len(part) != prod(shape) * item.itemsize:
            raise ValueError(f"an array of shape {shape} has {len(part)} bytes")
        values = np.frombuffer(part, item).reshape(shape)
        if code == ARRAY:
            return values
        if code != TENSOR or device.partition(":")[0] not in DEVICES:
            raise ValueError(f"an extension has code {code} and device {device}")
        import torch

        return torch.from_numpy(values).to(device)


def _encode_value(value: Any) -> Any:
    """Plain values for a value that MessagePack does not know: options, paths and devices."""
    if isinstance(value, Options):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Path) or type(value).__name__ == "device":
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"A value of type {type(value).__name__} does not travel.")


def _decode_other(kind: Any, value: Any) -> Any:
    """The value of an annotated type that MessagePack does not know."""
    if get_origin(kind) is np.ndarray or kind is object:
        return value  # the decoder compares the class
    if issubclass(kind, Options):
        return kind.model_validate(value)
    if isinstance(value, str) and (issubclass(kind, Path) or kind.__name__ == "device"):
        return kind(value)
    raise TypeError(f"a value of type {kind.__name__} is {type(value).__name__}")


def encode_call(build: Callable[..., Any], *arguments: Any) -> tuple[str, tuple[msgspec.Raw, ...]]:
    """The name of a function that a new process is to call, and the encoded arguments.

    Args:
        build: a function or class of a module, or a ``functools.partial`` of one without keywords.
        arguments: values after those of the partial; their types are those that the function's parameters declare.

    Raises:
        ValueError: another process cannot find the function by its name.
    """
    function: Any = build
    if isinstance(build, partial):
        function, arguments = build.func, (*build.args, *arguments)
    name = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__" or "<" in name:
        raise ValueError(f"{name} builds nothing in another process; a module that can be imported has to define it.")
    codec = Codec(Any)
    return name, tuple(msgspec.Raw(codec.encode(value)[0]) for value in arguments)


def decode_call(name: str, arguments: Sequence[msgspec.Raw]) -> Any:
    """Call the function of that name, which the command line gives and no message.

    Raises:
        ProtocolError: an argument is not of the type that the function declares.
    """
    module, _, path = name.partition(":")
    build = attrgetter(path)(import_module(module))
    parameters = signature(build, eval_str=True).parameters.values()
    return build(*(Codec(each.annotation).decode([raw]) for each, raw in zip(parameters, arguments, strict=True)))
