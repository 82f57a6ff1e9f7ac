"""Every Python block of the README and the docs runs as a test."""

import importlib.util
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md", "docs/*/*/*.md"],
).pytest()

# lightning-ir needs an older transformers, hence its own environment: `make test-lightning-ir`.
collect_ignore = (
    []
    if importlib.util.find_spec("lightning_ir")
    else [
        "docs/lightning_ir.md",
        "sparse_losses/integrations/lightning_ir.py",
        "tests/lightning_ir",
    ]
)


def pytest_addoption(parser):
    """Where the built site is."""
    parser.addoption("--site", help="test the built site in this folder, in a browser")


def pytest_ignore_collect(collection_path, config):
    """What needs a browser runs by `make test-site` alone."""
    site = Path(__file__).parent / "tests" / "browser"
    return True if collection_path == site and not config.getoption("--site") else None
