"""Count what a reader of the code meets: files, lines, names, words, and the files that one request passes.

Run ``python -m benchmarks.counts`` for this checkout, or ``python -m benchmarks.counts CHECKOUT ...`` for others. The
files of a request are counted from ``LLM.generate`` to the first product in the native library: all files with a call
in between, and the files on the call stack at that time. Generated pages do not count as words for a reader.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT
from benchmarks.same_outputs import environment

SMALL = 60  # lines
TRACE = """
import json, sys
from pathlib import Path
import cospec
from cospec import LLM, SamplingParams
root = str(Path(cospec.__file__).parent)
ran, stack = [], []
def trace(frame, event, _):
    name = frame.f_code.co_filename
    if event != "call" or not name.startswith(root):
        return
    short = name[len(root) + 1:]
    if short not in ran:
        ran.append(short)
    if frame.f_code.co_name in ("score", "_go", "_execute") and ("native" in short or "burst" in short):
        sys.setprofile(None)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(root) and file[len(root) + 1:] not in stack:
                stack.insert(0, file[len(root) + 1:])
            frame = frame.f_back
with LLM("zoo", {"method": "off"}) as llm:
    llm.generate(["warm"], SamplingParams(max_tokens=2))
    params = SamplingParams(max_tokens=1)
    sys.setprofile(trace)
    llm.generate(["A prompt that is new."], params)
    sys.setprofile(None)
print("RESULT" + json.dumps([ran, stack]))
"""


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file under a folder, parsed."""
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def static(root: Path) -> dict[str, int]:
    """Counts that need no run."""
    source = list(trees(root / "src" / "cospec"))
    classes = Counter(node.name for _, tree in source for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    calls = [node for _, tree in source for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path, _ in source}
    pages = [root / "README.md", *(path for path in (root / "docs").rglob("*.md") if not generated(path))]
    return {
        "Python files": len(source),
        "lines of Python": sum(lines.values()),
        "lines of C++": sum(len(path.read_text("utf-8").splitlines()) for path in sorted((root / "csrc").rglob("*.*"))),
        "lines of core/": sum(count for path, count in lines.items() if path.parent.name == "core"),
        f"modules under {SMALL} lines": sum(
            0 < count < SMALL and path.name != "__init__.py" for path, count in lines.items()
        ),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "getattr with a default": sum(
            isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3 for call in calls
        ),
        "private attributes in tests": private_uses(root / "tests"),
        "words of docs": sum(len(re.findall(r"\S+", path.read_text(encoding="utf-8"))) for path in pages),
    }


def generated(page: Path) -> bool:
    """Whether a command writes the page."""
    return "generated" in page.read_text(encoding="utf-8")[:300].lower()


def private_uses(folder: Path) -> int:
    """Lines of tests that read or write a private attribute of an object of the package."""
    found = set()
    for path, tree in trees(folder):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not re.fullmatch(r"_[a-z]\w*", node.attr):
                continue
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
            if not own:
                found.add((path, node.lineno))
    return len(found)


def passed(root: Path) -> tuple[list[str], list[str]]:
    """Files of ``src/cospec`` before a request's first product: those with a call, and those of the call stack."""
    done = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment(root), cwd=root, capture_output=True, text=True, check=True
    )
    ran, stack = json.loads(done.stdout.rsplit("RESULT", 1)[1])
    return ran, stack


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[ROOT])
    options = parser.parse_args()
    found: list[Mapping[str, int]] = []
    for root in options.checkouts:
        ran, stack = passed(root.resolve())
        own = {"files with a call before the first product": len(ran), "files on the stack at the product": len(stack)}
        found.append(static(root.resolve()) | own)
        print(f"{root.resolve().name}: calls in {' '.join(ran)}; stack {' > '.join(stack)}")
    table = Table("count", *(root.resolve().name for root in options.checkouts))
    for name in found[0]:
        table.add_row(name, *(str(counts[name]) for counts in found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
