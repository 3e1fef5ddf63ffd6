"""Shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import torch

torch.set_num_threads(1)  # the tests' tensors are tiny; more threads only wait for each other

# Engines measure themselves at start and keep what they found; a test must neither read nor leave any of the user's.
_CACHE = tempfile.mkdtemp(prefix="cospec-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
