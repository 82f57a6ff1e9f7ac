"""What the ranks of test_recipe.py run; and how a process of a test ends."""

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch


def example(name: str = "train_with_ddp") -> Any:
    """The module of an example."""
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def run(
    rank: int,
    folder: Path,
    *,
    dropout: float = 0.0,
    exact: bool = True,
    compiled: bool = False,
    stop_at: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train as the example does; return its last state."""
    script = example()
    training = script.start()
    training.encoder = script.tiny.encoder(dropout)
    if exact:
        training.encoder.double()
    if compiled:  # PyTorch's own operations: code for them takes a minute
        torch._dynamo.reset()
        training.compile(backend="aot_eager")
    if stop_at is not None:
        passes = itertools.count(1)

        def stop(*_: Any) -> None:
            if next(passes) == stop_at:
                raise InterruptedError

        training.register_forward_pre_hook(stop)
    return script.train(training, folder, **options)


def run_both(rank: int, folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the last state of every run; of a stopped one, that of the run that resumes it."""
    states = {}
    for name, options in runs.items():
        try:
            states[name] = run(rank, folder / name, **options)
        except InterruptedError:
            last = max((folder / name).glob("step-*.pt"))
            again = {key: value for key, value in options.items() if key != "stop_at"}
            states[name] = run(rank, folder / name, **again, resume=last)
    return states


def leave() -> NoReturn:
    """End a process that has done its work, without the interpreter's own end.

    A thread of gloo may still hold the last tensor that was sent. Where it lets go of it while the
    interpreter ends, it asks for the interpreter's lock, is unwound through C++ that allows no
    exception, and aborts the process: "terminate called without an active exception". That is
    PyTorch's, at least to 2.13, `destroy_process_group` or not (its issue 190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
