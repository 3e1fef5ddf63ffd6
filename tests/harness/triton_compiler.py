"""Compiling Triton's kernels for a GPU, which needs no GPU. The interpreter accepts more than the compiler."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import triton
from triton.backends.compiler import GPUTarget

def compiled(kernel, pointers, sizes, values={}):
    own = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    types = {name: "*" + pointers[name] if name in pointers else values.get(name, "i32") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, types | dict.fromkeys(own, "constexpr"), own)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

"""


def compile_for_gpu(code: str) -> None:
    """Run code in a process without the interpreter; ``compiled`` returns the PTX of a kernel.

    ``compiled`` takes the kernel, the types of pointers, the constants, and the types of numbers other than ``i32``.

    Raises:
        AssertionError: the code fails.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE + code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
