"""``python -m benchmarks.run.graphs``: forward and backward passes captured in a CUDA graph.

A replay must give what the eager call gives. An operation that waits for the GPU is an error while
a graph is recorded.
"""

import sys
import warnings

import torch

from benchmarks.losses import cases
from benchmarks.run.check import ready
from benchmarks.schema import Case, Maker


def captured(case: Case, device: torch.device) -> str:
    """Return ``ok``, or what went wrong."""
    variant = next(each for each in case.variants() if each.name == "ours")
    call = ready(case, variant, [case.inputs(Maker(device))])
    expected = call.both()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture needs a warm-up on a stream of its own
        for _ in range(3):
            call.both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, gradients = call.both()
    graph.replay()
    torch.cuda.synchronize()
    pairs = zip((value, *gradients), (expected[0], *expected[1]), strict=True)
    wrong = max(
        (a.float() - b.float()).norm().item() / max(b.norm().item(), 1e-30) for a, b in pairs
    )
    return "ok" if wrong < 1e-2 else f"MISMATCH: off by {wrong:.1e}"


def main() -> int:
    """Capture the small case of every loss; return 1 if one cannot be."""
    if not torch.cuda.is_available():
        print("no CUDA device is available", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    failed = 0
    for case in cases("tiny"):
        try:
            status = captured(case, torch.device("cuda"))
        except Exception as error:
            status = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(case.loss, case.name, status, flush=True)
        failed += status != "ok"
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
