"""Write the table of trainers in docs/compatibility.md from the tests marked `works_with`.

``pytest --compatibility docs/results/compatibility.json`` writes the results. What the page says
after the table stays.
"""

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

This page shows what is tested with which trainer. A mark stands for tests that train with the real
package and compare weights or losses with a plain loop. An empty cell is untested. All tests ran on
CPUs; two devices are two gloo processes.

"""
FOOT = """
`make compatibility` writes this table from a test run. `docs/results/compatibility.json` has the
tests of each cell.
"""


def render(record: dict[str, Any]) -> str:
    """Return the page; a test that failed backs nothing."""
    passed = [test for test in record["tests"].values() if test["outcome"] == "passed"]
    backed = {
        (trainer, feature)
        for test in passed
        for trainer, *features in test["works_with"]
        for feature in features
    }
    lines = ['<div class="dense-table" markdown>', ""]
    lines += ["| | " + " | ".join(TRAINERS) + " |", "|---|" + ":---:|" * len(TRAINERS)]
    for feature, title in FEATURES.items():
        cells = ["✓" if (trainer, feature) in backed else "" for trainer in TRAINERS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    versions = [
        ", ".join(f"{package} {record['versions'].get(package, '')}" for package in packages)
        for packages in TRAINERS.values()
    ]
    lines += ["| tested with | " + " | ".join(versions) + " |", "", "</div>"]
    return HEAD + "\n".join(lines) + "\n" + FOOT


if __name__ == "__main__":
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(FOOT.splitlines()[-1] + "\n")
    table = render(json.loads(RECORD.read_text(encoding="utf-8")))
    PAGE.write_text(table + rest, encoding="utf-8")
