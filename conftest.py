"""Every Python block of the README and the docs runs as a test."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

try:
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
except ImportError:  # a machine with a GPU may have little else
    Sybil = None

# Without a GPU the head's kernel runs in Triton's interpreter, chosen when it is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if Sybil is not None:
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
if importlib.util.find_spec("triton") is None:  # only Linux has it
    collect_ignore += [
        "tests/representation/test_triton_head.py",
        "sparse_losses/fast/triton_head.py",
    ]


def pytest_addoption(parser):
    """Where the built site is, and the device of the tests."""
    parser.addoption("--site", help="test the built site in this folder, in a browser")
    parser.addoption(
        "--device",
        choices=["cpu", "cuda", "sim"],
        default="cpu",
        help="where tensors are made that no test puts anywhere; Triton's kernel needs cuda; "
        "sim is the CPU with the rules of a GPU (tools/simulated_device)",
    )


def pytest_configure(config):
    """Without a GPU ``--device cuda`` is one error, not one a test; without a compiler, no run."""
    config.addinivalue_line("markers", "cpu_only: what is tested is the CPU's; skipped elsewhere")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("no CUDA device is available")
    if config.getoption("--device") == "sim":
        from tools import simulated_device

        if reason := simulated_device.why_not():
            pytest.exit(f"skipped: {reason}", returncode=0)
        simulated_device.start()


@pytest.fixture(autouse=True)
def _on_device(request):
    device = request.config.getoption("--device")
    if device == "cpu":
        yield
        return
    from tools.on_device import on_device

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
    from tools.on_device import why_not_there

    try:
        return (yield)
    except Exception as error:
        if reason := why_not_there(error, device):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Modules and parameters of tests make tensors as well, before any fixture."""
    device = session.config.getoption("--device")
    if device == "cpu":
        return (yield)
    from tools.on_device import on_device

    with on_device(device):
        return (yield)


def pytest_ignore_collect(collection_path, config):
    """What needs a browser, or a process with another device in it, runs where it is asked for."""
    tests = Path(__file__).parent / "tests"
    if collection_path == tests / "browser":
        return None if config.getoption("--site") else True
    if collection_path == tests / "simulated_device":
        return None if any("simulated_device" in path for path in config.args) else True
    return None
