"""Writes docs/compatibility.md from what the tests marked `works_with` found.

    python tools/compatibility.py RECORD...

The records are what `pytest --compatibility FILE` wrote, one an environment. They are merged into
docs/results/compatibility.json; without any, that file is rendered again.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECORD = DOCS / "results" / "compatibility.json"
PAGE = DOCS / "compatibility.md"

# In the order of the table, with what a cell says.
FEATURES = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16 + GradScaler",
    "compile": "torch.compile",
    "accumulation": "accumulation",
    "devices": "2 devices",
    "sharded": "FSDP2",
    "cached": "gradient caching",
    "resume": "resume",
}
TRAINERS = {  # and the packages that a column stands for
    "PyTorch": ["torch"],
    "sentence-transformers": ["sentence-transformers", "transformers"],
    "Hugging Face Trainer": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "Lightning": ["lightning"],
    "lightning-ir": ["lightning-ir", "transformers"],
}

HEAD = """---
description: Which trainers work with half precision, compilation, several devices and caching.
---

# Compatibility

Each mark means that tests train with the real package and compare weights or losses with a plain
loop; the tests are linked below the table. An empty cell is untested. Everything ran on CPUs; two
devices are two gloo processes. `make compatibility` writes this page from a test run.

"""


def merge(paths: list[str]) -> dict[str, Any]:
    """Every record's tests, each with the versions of its environment."""
    tests: dict[str, Any] = {}
    for path in paths:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, found in record["tests"].items():
            # One entry a test function: parameters are its own affair.
            entry = tests.setdefault(
                name.partition("[")[0],
                {"works_with": [], "outcome": "passed", "versions": record["versions"]},
            )
            for said in found["works_with"]:
                if said not in entry["works_with"]:
                    entry["works_with"].append(said)
            if found["outcome"] != "passed":
                entry["outcome"] = found["outcome"]
    return dict(sorted(tests.items()))


def render(tests: dict[str, Any]) -> str:
    """The page."""
    backing: dict[tuple[str, str], list[str]] = {}
    versions: dict[str, dict[str, str]] = {}
    for name, found in tests.items():
        if found["outcome"] != "passed":
            continue
        for trainer, *features in found["works_with"]:
            versions[trainer] = found["versions"]
            for feature in features:
                backing.setdefault((trainer, feature), []).append(name)
    lines = ['<div class="dense-table" markdown>', ""]
    lines += ["| | " + " | ".join(TRAINERS) + " |", "|---|" + ":---:|" * len(TRAINERS)]
    for feature, title in FEATURES.items():
        cells = ["✓" if (trainer, feature) in backing else "" for trainer in TRAINERS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "</div>"]
    for trainer, packages in TRAINERS.items():
        lines += ["", f"## {trainer}", ""]
        if trainer in versions:
            listed = ", ".join(f"{package} {versions[trainer][package]}" for package in packages)
            lines += [f"With {listed}.", ""]
        for feature, title in FEATURES.items():
            names = backing.get((trainer, feature), [])
            if names:
                lines.append(f"- {title}: " + ", ".join(map(_link, names)))
    torch_versions = sorted({v["torch"] for v in versions.values()})
    lines += ["", f"PyTorch {', '.join(torch_versions)}."]
    return HEAD + "\n".join(lines) + "\n"


def _link(name: str) -> str:
    """The test's name: a cross-reference where the test stands on a page, else with its file."""
    path, _, function = name.partition("::")
    function = re.sub(r"^.*::", "", function)
    title = function.removeprefix("test_").replace("_", " ")
    page = DOCS / "tests" / f"{Path(path).parts[1]}.md"  # one a folder
    if page.exists():
        return f"[{title}][{path.removesuffix('.py').replace('/', '.')}.{function}]"
    return f"{title} (`{path}`)"


def main() -> None:
    """Merges the records given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="*", help="written by pytest --compatibility")
    arguments = parser.parse_args()
    if arguments.record:
        tests = merge(arguments.record)
        RECORD.write_text(json.dumps(tests, indent=1) + "\n", encoding="utf-8")
        failed = [name for name, found in tests.items() if found["outcome"] == "failed"]
        if failed:
            print("failed, and left out of the table:", *failed, sep="\n  ")
    PAGE.write_text(render(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
