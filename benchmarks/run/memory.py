"""Peak extra memory, as seen by PyTorch's allocator.

On a CPU the profiler's allocation events are summed in order: exact to the byte and without noise.
Memory that a library does not allocate through PyTorch is not included. On a GPU it is the
allocator's own high-water mark.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Tensors = Sequence[Tensor | None]


def peak_bytes(run: Callable[[], Tensors], device: torch.device) -> tuple[int, int]:
    """Return the peak memory that ``run`` allocates, with and without the gradients it returns.

    ``run`` returns the gradients, so that they are alive at the end and can be identified.
    """
    if device.type == "cuda":
        return _peak_on_cuda(run, device)
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # the profiler's native code prints there
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            gradients = run()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
    kept = {pointer for tensor in gradients if tensor is not None for pointer in storages(tensor)}
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(_allocations(results.experimental_event_tree()), key=lambda event: event[0])
    # Addresses are reused: a gradient is the last allocation at its address.
    gradient_events = {pointer: index for index, (_, _, pointer) in enumerate(events)}
    running = without = peak = peak_without = 0
    alive: dict[int, tuple[int, bool]] = {}
    for index, (_, size, pointer) in enumerate(events):
        if size > 0:
            is_gradient = pointer in kept and gradient_events[pointer] == index
            alive[pointer] = size, is_gradient
            running += size
            without += 0 if is_gradient else size
        elif pointer in alive:  # ignore earlier allocations
            size, is_gradient = alive.pop(pointer)
            running -= size
            without -= 0 if is_gradient else size
        peak, peak_without = max(peak, running), max(peak_without, without)
    return peak, peak_without


def _allocations(roots: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    pending = list(roots)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            yield event.start_time_ns, fields.alloc_size, fields.ptr


def storages(tensor: Tensor) -> dict[int, int]:
    """Return address and size of every buffer of a dense or sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout == torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor]
    owned = (part.untyped_storage() for part in parts)
    return {storage.data_ptr(): storage.nbytes() for storage in owned}


def _peak_on_cuda(run: Callable[[], Tensors], device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    gradients = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    buffers: dict[int, int] = {}
    for tensor in gradients:
        if tensor is not None:
            buffers |= storages(tensor)
    return peak, max(peak - sum(buffers.values()), 0)


def available_bytes(device: torch.device) -> int:
    """Return the free memory."""
    if device.type == "cuda":
        # Memory that PyTorch caches counts as free.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
