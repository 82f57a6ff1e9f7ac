"""One thread, one seed a test, Hypothesis without deadlines; a record of what works with what."""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # test modules import `tests.cases` and `tests.oracles`

# What `works_with(trainer, *features)` may say: the rows and columns of docs/compatibility.md.
from tools.compatibility import FEATURES, TRAINERS  # noqa: E402

torch.set_num_threads(1)

_common = {
    "deadline": None,
    "max_examples": 30,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", **_common)
settings.register_profile("ci", derandomize=True, **_common)
# `make fuzz`: new problems each time, whatever the environment; a failure prints how to repeat it.
settings.register_profile("fuzz", **_common | {"max_examples": 300}, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser):
    parser.addoption(
        "--compatibility", metavar="FILE", help="write the outcome of the `works_with` tests there"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "works_with(trainer, *features): backs cells of docs/compatibility.md; "
        f"{list(TRAINERS)}, {list(FEATURES)}",
    )
    if config.getoption("--compatibility") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Compatibility(config.getoption("--compatibility")))


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("works_with"):
            trainer, *features = mark.args
            if trainer not in TRAINERS:
                raise pytest.UsageError(f"{item.nodeid}: unknown trainer {trainer!r}")
            if unknown := set(features) - set(FEATURES):
                raise pytest.UsageError(f"{item.nodeid}: unknown features {sorted(unknown)}")
            item.user_properties.append(("works_with", [trainer, *features]))


class _Compatibility:
    """Collects, on the process that workers report to, the outcomes of the marked tests."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.outcomes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report):
        marks = [value for name, value in report.user_properties if name == "works_with"]
        if not marks or (report.when != "call" and report.outcome == "passed"):
            return
        # All parameters of a test function share one entry.
        name = report.nodeid.partition("[")[0]
        entry = self.outcomes.setdefault(name, {"works_with": [], "outcome": "passed"})
        entry["works_with"] += [mark for mark in marks if mark not in entry["works_with"]]
        if report.outcome != "passed":
            entry["outcome"] = report.outcome

    def pytest_sessionfinish(self):
        names = "torch", "transformers", "sentence-transformers", "accelerate", "lightning"
        versions = {name: importlib.metadata.version(name) for name in names}
        record = {"versions": versions, "tests": dict(sorted(self.outcomes.items()))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
