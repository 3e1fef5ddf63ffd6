"""The struct of ``native/pool_lockstep.py``; ``native/structs.py`` confirms its size and offsets."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class LockstepDrafterStruct(Structure):
    """``csrc/spec/pool_lockstep.h``."""

    _fields_ = [("model", c_void_p), ("cache", c_void_p), ("num_slices", c_int64), ("num_tokens", c_int64)]
