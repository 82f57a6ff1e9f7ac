"""The table of trainers in docs/compatibility.md, from the tests marked ``works_with``.

``pytest --compatibility docs/results/compatibility.json`` writes the results.
"""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "results" / "compatibility.json"

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


def render(record: dict[str, Any]) -> str:
    """Return the table of a record; a test that failed backs nothing."""
    backed = {
        (trainer, feature)
        for test in record["tests"].values()
        for trainer, *features in test["works_with"] * (test["outcome"] == "passed")
        for feature in features
    }
    lines = ["| | " + " | ".join(TRAINERS) + " |", "|---|" + ":---:|" * len(TRAINERS)]
    for feature, title in FEATURES.items():
        cells = ["✓" if (trainer, feature) in backed else "" for trainer in TRAINERS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    versions = [
        ", ".join(f"{package} {record['versions'].get(package, '')}" for package in packages)
        for packages in TRAINERS.values()
    ]
    return "\n".join([*lines, "| tested with | " + " | ".join(versions) + " |"])


def table() -> str:
    """Return the table of the committed record."""
    return render(json.loads(RECORD.read_text(encoding="utf-8")))
