"""Runs examples/train_ddp.py several times in one process a rank: imports cost more than training.

``torchrun tests/distributed/recipe.py FILE``: the file is a list of runs, each with its arguments,
the file that it prints to and, at most, one thing that goes wrong or is different.
"""

import contextlib
import functools
import importlib.util
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from sparse_losses import InfoNCELoss, SpladeObjective

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"


def load():
    spec = importlib.util.spec_from_file_location("train_ddp", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class Stopped(Exception):
    pass


def at_backward_pass(script, number: int, do) -> None:
    """Calls ``do`` in the middle of the backward pass of that number."""
    forward, calls = script.Training.forward, []

    def wrapped(self, *args):
        output = forward(self, *args)
        calls.append(None)
        if len(calls) == number:
            output.total.register_hook(do)
        return output

    script.Training.forward = wrapped


def of_one_text_at_a_time(weights, **options) -> SpladeObjective:
    """An objective whose mean over a batch is the mean over its parts."""
    weights = {"query_self_reconstruction": 1.0, "document_min_activation": 0.5}
    weights |= {"query_flops": 1e-30, "document_flops": 1e-30}
    # Of no temperature: DDP waits for the gradient of every parameter.
    return SpladeObjective(weights, **options | {"info_nce": InfoNCELoss()})


def stop(_) -> None:
    raise Stopped


def kill(_) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(_) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def run(arguments: list[str], output: str, **different) -> None:
    script = load()
    for name, do in (("stop_at", stop), ("kill_at", kill), ("hang_at", hang)):
        if name in different:
            at_backward_pass(script, different[name], do)
    # In one graph, by PyTorch's own operations: code for them takes a minute.
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    script.Training.compile = compiled
    if different.get("decomposes"):
        script.SpladeObjective = of_one_text_at_a_time
    path = Path(f"{output}-{os.environ['RANK']}")
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        try:
            script.main(arguments)
        except Stopped:
            pass
        except SystemExit as mistake:
            if not different.get("is_mistake"):
                raise
            print(mistake)


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


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1].endswith(".py"):  # a script as it stands, with its arguments
        script, *words = sys.argv[1:]
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        return
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if len(runs) > 1:  # one process group for all of them
        dist.init_process_group("gloo")
        dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    for each in runs:
        torch._dynamo.reset()
        run(**each)


if __name__ == "__main__":
    main()
    leave()
