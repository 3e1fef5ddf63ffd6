"""How a process ends: what was begun inside is ended, the interpreter's modules are not taken apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from cospec.process_utils import fast_exit

class Module:
    def __del__(self):
        print("taken apart")

module = Module()
late = lambda: (time.sleep(0.05), print("thread"))
with fast_exit():
    atexit.register(print, "clean-up")
    threading.Thread(target=late).start()
    print("work")
    ENDING
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('reason')", 1), ("raise KeyError('lost')", 1)],
)
def test_clean_up_is_done_and_the_exit_code_kept(ending: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.replace("ENDING", ending)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split()) == (code, ["work", "thread", "clean-up"])
    assert ("KeyError: 'lost'" in ended.stderr) == ("lost" in ending)
    assert ("reason" in ended.stderr) == ("reason" in ending)
