"""Distributions on a device stand for the array that the host would have."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.rng.random_streams import Floats
from cospec.runtime.codec import Codec

HOST = np.random.default_rng(0).dirichlet(np.ones(5), size=(3, 4))  # sequences, steps
TOKENS = HOST.argmax(-1)


def probs() -> DeviceProbs:
    return DeviceProbs(torch.from_numpy(HOST.copy()), np.take_along_axis(HOST, TOKENS[..., None], -1)[..., 0])


@pytest.mark.parametrize("key", [1, slice(0, 2), [0, 2], np.array([2, 0]), (1, slice(0, 3)), (2, 1)], ids=str)
def test_a_part_is_the_part_of_the_array(key: Any) -> None:
    found = probs()[key]
    assert isinstance(found, DeviceProbs) and found.shape == HOST[key].shape
    assert np.array_equal(np.asarray(found), HOST[key])
    assert np.array_equal(found.chosen, HOST.max(-1)[key])


@pytest.mark.parametrize("key", [(1, 2, 3), (1, 2, slice(2)), (..., 0), (0, None)], ids=str)
def test_numbers_are_those_of_the_array(key: Any) -> None:
    found = probs()[key]
    assert not isinstance(found, DeviceProbs) and np.array_equal(found, HOST[key])


def test_readers_use_it_as_the_array() -> None:
    found = probs()
    row, last = found[1, 2], found[1, 2][4]
    assert last == HOST[1, 2, 4] and len(found) == 3 and [len(each) for each in found] == [4, 4, 4]
    assert np.array_equal(1.0 - row, 1.0 - HOST[1, 2]) and np.array_equal(HOST[0, 0] - row, HOST[0, 0] - HOST[1, 2])
    assert np.array_equal(row > 0.2, HOST[1, 2] > 0.2) and row.max() == HOST[1, 2].max()
    assert np.array_equal(np.stack([row, row]), HOST[[1, 1], [2, 2]]) and row.dtype == np.float64
    with pytest.raises(AttributeError):
        _ = row.no_such_attribute


def test_the_host_copies_once() -> None:
    found = probs()
    found.rows = Mock(wraps=found.rows, shape=found.rows.shape)
    for _ in range(3):
        assert np.asarray(found, dtype=np.float32).dtype == np.float32
    assert found.rows.cpu.call_count == 1
    assert np.array(found, copy=True) is not np.asarray(found)


def test_a_message_has_the_array() -> None:
    codec = Codec(list[Floats])
    (received,) = codec.decode(codec.encode([probs()]))
    assert isinstance(received, np.ndarray) and np.array_equal(received, HOST)
