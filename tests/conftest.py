"""Shared by all tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # the tests' tensors are tiny; more threads only wait for each other
