"""Processes of ours stand still for no garbage collection of what they keep for good."""

from __future__ import annotations

import gc

from cospec.process_utils import freeze_gc


def test_garbage_collection_skips_only_objects_made_before() -> None:
    kept = [[n] for n in range(1000)]
    before = gc.get_freeze_count()
    freeze_gc()
    assert gc.get_freeze_count() >= before + len(kept)
    assert not any(each is kept for each in gc.get_objects())
    later = [kept]
    assert any(each is later for each in gc.get_objects())
