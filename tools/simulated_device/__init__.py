"""A simulated accelerator for machines without one: ``start()``, then ``device="sim"``.

It uses the host's memory and the CPU's kernels, but follows the rules of a GPU:

- **Operands.** A CPU tensor among the operands is an error, except a number (0-d); an index is
  copied.
- **New memory is NaN**, which shows reads of memory that was not written.
- **A launch** is an operation that reaches the device, also inside a composite one; views and
  allocations do not count. Every launch has its bytes (operands read, results written) and, for a
  matrix product, its floating-point operations and the dtype of its factors.
- **A wait** occurs when the host needs a result that the device has not computed yet: ``item()``,
  an index by a mask and other results whose size depends on values, a copy between device and host
  (except a non-blocking copy of pinned memory), ``synchronize()``, and an event that has not been
  reached. The device is some launches behind the host (``lag``): a non-blocking copy to pinned
  memory arrives that much later, or at the next wait. Until then the memory is NaN.
- **Autocast** has CUDA's lists. ``mm``, ``bmm``, ``addmm`` and ``baddbmm`` take ``out_dtype``:
  halves are multiplied and summed in fp32.
- **Shapes only.** Within ``shape_only()`` nothing is computed or stored, but everything is counted,
  so tensors can have any size. Reading a value is an error there.

There are no sparse layouts. The build takes about a minute and needs a C++ compiler and ninja; it
is cached in ``build/`` by the version of PyTorch and the digest of the source.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import sysconfig
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

__all__ = ["Counts", "Operation", "counting", "lag", "shape_only", "start", "why_not"]

SOURCE = Path(__file__).with_name("sim.cpp")
BUILD = Path(__file__).resolve().parents[2] / "build" / "simulated_device"


class Operation(NamedTuple):
    """An operation that reached the device or made the host wait for it."""

    name: str
    bytes: int
    flops: int
    dtype: torch.dtype  # dtype of the factors of a matrix product
    launches: bool
    waits: bool


@dataclass
class Counts:
    """The operations within ``counting()``, complete at its end."""

    operations: list[Operation] = field(default_factory=list)
    peak_bytes: int = 0  # in addition to the memory in use at the beginning

    @property
    def launches(self) -> int:
        """The number of operations that reached the device."""
        return sum(operation.launches for operation in self.operations)

    @property
    def waits(self) -> int:
        """The number of times that the host waited."""
        return sum(operation.waits for operation in self.operations)

    @property
    def bytes(self) -> int:
        """The number of bytes that all launches read and wrote."""
        return sum(operation.bytes for operation in self.operations)

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """The floating-point operations of matrix products, by the dtype of their factors."""
        found: Counter[torch.dtype] = Counter()
        for operation in self.operations:
            if operation.flops:
                found[operation.dtype] += operation.flops
        return dict(found)

    @property
    def names(self) -> Counter[str]:
        """The number of launches of each operation."""
        return Counter(operation.name for operation in self.operations if operation.launches)


def why_not() -> str | None:
    """Return what is missing to build the device, or ``None``."""
    compiler = os.environ.get("CXX", "c++")
    with mock.patch.dict(os.environ, PATH=_path()):
        missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} to build the simulated device with" if missing else None


def _path() -> str:
    """Return PATH with the programs of this environment, which may not be activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


@functools.cache
def start() -> Any:
    """Build the device if it is not cached, and register the device type ``sim`` in PyTorch.

    Raises:
        RuntimeError: without a compiler.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    from torch.utils import cpp_extension

    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = BUILD / f"{torch.__version__}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, PATH=_path()):
        extension = cpp_extension.load(
            name="simulated_device",
            sources=[str(SOURCE)],
            build_directory=str(folder),
            extra_cflags=["-O1"],
        )
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    # This registers the shapes of operations that have no meta kernel in C++.
    importlib.import_module("torch._meta_registrations")
    return extension


def _module(extension: Any) -> types.ModuleType:
    """Return ``torch.sim``, with the functions that ``torch.amp`` and others call."""
    module = types.ModuleType("torch.sim")
    contents = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda index: contextlib.nullcontext(),
        # The device uses the CPU's generator, so saving the CPU's state saves both.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "synchronize": lambda device=None: extension.synchronize(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "Event": functools.partial(torch.Event, "sim"),
        "memory_allocated": lambda device=None: extension.memory_allocated(),
        "max_memory_allocated": lambda device=None: extension.max_memory_allocated(),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak_memory_stats(),
        "empty_cache": lambda: None,
    }
    vars(module).update(contents)
    return module


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count all operations on the device within the block, of all threads."""
    extension, counts = start(), Counts()
    before = extension.begin()
    try:
        yield counts
    finally:
        operations, peak = extension.end()
        counts.operations = [Operation(*each) for each in operations]
        counts.peak_bytes = peak - before


@contextlib.contextmanager
def shape_only() -> Iterator[None]:
    """Count without computing; tensors created within the block never have values."""
    extension = start()
    before = extension.set_shape_only(True)
    try:
        yield
    finally:
        extension.set_shape_only(before)


@contextlib.contextmanager
def lag(launches: int) -> Iterator[None]:
    """Set the number of launches that the device is behind the host (default 10)."""
    extension = start()
    before = extension.set_lag(launches)
    try:
        yield
    finally:
        extension.set_lag(before)
