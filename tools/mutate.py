"""``make mutate``: mutmut, and a line of scores for each file.

mutmut leaves decorated functions alone, as decorators may have side effects. ``@loss`` has none, so
that functions below it are mutated as well. The configuration is in ``pyproject.toml``.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import libcst as cst
from mutmut.__main__ import cli
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.stats import status_by_exit_code


def is_loss(node: cst.CSTNode) -> bool:
    """Return whether ``@loss(...)`` is the only decorator of a function."""
    if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
        return False
    decorator = node.decorators[0].decorator
    return isinstance(decorator, cst.Call) and getattr(decorator.func, "value", "") == "loss"


def scores() -> str:
    """Return how many mutants of each file were tried and killed."""
    lines = ["file,mutants,killed,timed out,survived,score"]
    for path in sorted(Path("mutants").rglob("*.meta")):
        codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].values()
        count: Counter[str] = Counter(status_by_exit_code[code] for code in codes)
        del count["not checked"], count["skipped"]
        if tried := count.total():
            killed = count["killed"] + count["timeout"]
            file = path.relative_to("mutants").with_suffix("")
            numbers = (tried, count["killed"], count["timeout"], tried - killed)
            lines.append(f"{file},{','.join(map(str, numbers))},{killed / tried:.3f}")
    return "\n".join(lines)


def main() -> Any:
    """Run mutmut with the arguments of the command line, then print the scores."""
    skip = MutationVisitor._skip_node_and_children
    MutationVisitor._skip_node_and_children = lambda self, node: (
        not is_loss(node) and skip(self, node)
    )
    code = cli(["run", *sys.argv[1:]], standalone_mode=False)
    print(scores())
    return code


if __name__ == "__main__":
    sys.exit(main())
