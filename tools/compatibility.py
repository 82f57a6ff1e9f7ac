"""Write docs/compatibility.md from the results of the tests marked `works_with`.

    python tools/compatibility.py RECORD...

`pytest --compatibility FILE` writes a record, one per environment. They are merged into
docs/results/compatibility.json; without a record, the page is rendered from that file.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RECORD = DOCS / "results" / "compatibility.json"
PAGE = DOCS / "compatibility.md"

# The rows of the table in order, with their titles.
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
TRAINERS = {  # the columns, with the packages whose versions they show
    "PyTorch": ["torch"],
    "sentence-transformers": ["sentence-transformers", "transformers"],
    "Hugging Face Trainer": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "Lightning": ["lightning"],
}

HEAD = """---
description: Which trainers work with half precision, compilation, several devices and caching.
---

# Compatibility

A mark stands for tests that train with the real package and compare weights or losses with a plain
loop. An empty cell is untested. Everything ran on CPUs; two devices are two gloo processes.

"""
FOOT = """
`make compatibility` writes this page from a test run. `docs/results/compatibility.json` has all
tests of each cell.
"""


def merge(paths: list[str]) -> dict[str, Any]:
    """Return the tests of all records, each with the versions of its environment."""
    tests: dict[str, Any] = {}
    for path in paths:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, test in record["tests"].items():
            # All parameters of a test function share one entry.
            entry = tests.setdefault(
                name.partition("[")[0],
                {"works_with": [], "outcome": "passed", "versions": record["versions"]},
            )
            for mark in test["works_with"]:
                if mark not in entry["works_with"]:
                    entry["works_with"].append(mark)
            if test["outcome"] != "passed":
                entry["outcome"] = test["outcome"]
    return dict(sorted(tests.items()))


def render(tests: dict[str, Any]) -> str:
    """Return the page."""
    backing: set[tuple[str, str]] = set()
    versions: dict[str, dict[str, str]] = {}
    for test in tests.values():
        if test["outcome"] != "passed":
            continue
        for trainer, *features in test["works_with"]:
            versions[trainer] = test["versions"]
            backing |= {(trainer, feature) for feature in features}

    lines = ['<div class="dense-table" markdown>', ""]
    lines += ["| | " + " | ".join(TRAINERS) + " |", "|---|" + ":---:|" * len(TRAINERS)]
    for feature, title in FEATURES.items():
        cells = ["✓" if (trainer, feature) in backing else "" for trainer in TRAINERS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    with_versions = [
        ", ".join(f"{package} {versions[trainer][package]}" for package in packages)
        if trainer in versions
        else ""
        for trainer, packages in TRAINERS.items()
    ]
    lines += ["| tested with | " + " | ".join(with_versions) + " |", "", "</div>"]
    return HEAD + "\n".join(lines) + "\n" + FOOT


def main() -> None:
    """Merge the given records and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="*", help="written by pytest --compatibility")
    arguments = parser.parse_args()
    if arguments.record:
        tests = merge(arguments.record)
        RECORD.write_text(json.dumps(tests, indent=1) + "\n", encoding="utf-8")
        failed = [name for name, test in tests.items() if test["outcome"] == "failed"]
        if failed:
            print("these tests failed and are left out of the table:", *failed, sep="\n  ")
    PAGE.write_text(render(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
