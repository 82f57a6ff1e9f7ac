"""Every test here runs twice: by the plain formula, and by the hand-written gradient."""

import pytest


@pytest.fixture(autouse=True)
def _both_paths(path):
    """See the fixture of that name."""
