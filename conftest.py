"""Every Python block of the README and the docs runs as a test."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md", "docs/*.md"]
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A page's blocks build on each other: they go to one worker (``--dist loadgroup``)."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
