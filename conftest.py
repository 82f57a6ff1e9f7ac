"""Every Python block of the README and the docs runs as a test."""

from pathlib import Path

import pytest
import torch

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a machine with a GPU may have little else
    Sybil = None

if Sybil is not None:
    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md", "docs/*/*.md", "docs/*/*/*.md"],
    ).pytest()


def pytest_addoption(parser):
    """Where the built site is, and the device of the tests."""
    parser.addoption("--site", help="test the built site in this folder, in a browser")
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where tensors are made that no test puts anywhere",
    )


def pytest_configure(config):
    """Without a GPU ``--device cuda`` is one error, not one a test."""
    config.addinivalue_line("markers", "cpu_only: what is tested is the CPU's; skipped elsewhere")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("no CUDA device is available")


@pytest.fixture(autouse=True)
def _on_device(request):
    device = request.config.getoption("--device")
    if device == "cpu":
        yield
        return
    from tests.on_device import on_device

    with on_device(device):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips what says itself that it is not for this device."""
    device = item.config.getoption("--device")
    if device == "cpu":
        return (yield)
    if item.get_closest_marker("cpu_only"):
        pytest.skip("the CPU's own")
    try:
        return (yield)
    except ValueError as error:  # an implementation for the CPU
        if f"on the CPU, got {device}" in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Modules and parameters of tests make tensors as well, before any fixture."""
    device = session.config.getoption("--device")
    if device == "cpu":
        return (yield)
    from tests.on_device import on_device

    with on_device(device):
        return (yield)


def pytest_ignore_collect(collection_path, config):
    """What needs a browser runs where it is asked for."""
    if collection_path == Path(__file__).parent / "tests" / "browser":
        return None if config.getoption("--site") else True
    return None
