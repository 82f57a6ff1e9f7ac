"""CUDA graphs: the time of the kernels alone, and whether a call waits for the GPU.

A captured call is replayed without Python, checks and launches. A call that reads a value from the
GPU cannot be captured; its status says so.
"""

from collections.abc import Callable

import torch

from benchmarks.run import memory, timing

__all__ = ["replayed", "waits_for_the_gpu"]

Replays = tuple[str, timing.Quartiles | None]
SHARE = 0.4  # largest share of the free memory that a graph may keep


def waits_for_the_gpu(run: Callable[[], object]) -> str:
    """Return the operation of a call that needs a value from the GPU, or an empty string."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return _line(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def replayed(
    run: timing.Run, device: torch.device, *, needs: float, calls: int = 20, rounds: int = 5
) -> Replays:
    """Return ``ok`` and the times of a replay, or the reason why there are none.

    Args:
        run: a warmed-up call; its argument is the number of the call.
        device: the device; only a GPU has graphs.
        needs: bytes that a call allocates, which the graph keeps.
        calls: replays per sample.
        rounds: number of samples.
    """
    if device.type != "cuda":
        return "", None
    if needs > SHARE * memory.available_bytes(device):
        return f"skipped: the graph would keep {needs / 2**30:.0f} GiB", None
    try:
        if waits := waits_for_the_gpu(lambda: run(0)):
            return f"waits for the GPU: {waits}", None
        found: Replays = "ok", _times(run, device, calls, rounds)
    except Exception as error:
        found = f"failed: {type(error).__name__}: {_line(error)}", None
    torch.cuda.empty_cache()
    return found


def _times(run: timing.Run, device: torch.device, calls: int, rounds: int) -> timing.Quartiles:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        kept = run(0)
    take = timing.cuda_sampler(device)
    times = [take(lambda _: graph.replay(), calls) for _ in range(rounds)]
    del kept  # the graph writes to it until here
    return timing.Quartiles.of(times)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:150]
