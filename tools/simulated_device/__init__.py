"""A device that is not the CPU, on a machine without one: ``start()``, then ``device="sim"``.

Its memory is the host's and its kernels are the CPU's, but its rules are a GPU's:

- **Operands.** A tensor on the CPU among the operands is an error; a number (0-d) is none, and an
  index is copied.
- **Fresh memory is NaN**, so that what is read before it is written shows.
- **A launch** is an operation that reaches the device, those inside composite ones included; views
  and empty memory are none. Every launch has its bytes (operands read, results written) and, if it
  is a matrix product, its floating-point operations and the dtype of its factors.
- **A wait** is a moment at which the host needs what the device has not made yet: ``item()``, an
  index by a mask and other results whose size is a value, a copy between device and host unless
  that memory is pinned and the copy non-blocking, ``synchronize()``, and an event that has not been
  reached. The device runs some launches behind the host (``lag``): a non-blocking copy to pinned
  memory arrives that much later, or at the next wait. Until then the memory is NaN.
- **Autocast** has CUDA's lists. ``mm``, ``bmm``, ``addmm`` and ``baddbmm`` take ``out_dtype``:
  halves are multiplied and summed in fp32.
- **Shapes alone.** Within ``shape_only()`` nothing is computed or stored, yet all is counted: rows
  of any size. What reads a value is an error there.

There are no sparse layouts. Building takes about a minute and needs a C++ compiler and ninja; the
result is kept in ``build/`` by the version of PyTorch and the digest of the source.
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
    """What reached the device, or made the host wait for it."""

    name: str
    bytes: int
    flops: int
    dtype: torch.dtype  # of the factors of a product
    launches: bool
    waits: bool


@dataclass
class Counts:
    """What happened within ``counting()``, complete at its end."""

    operations: list[Operation] = field(default_factory=list)
    peak_bytes: int = 0  # beyond what was there at the beginning

    @property
    def launches(self) -> int:
        """Operations that reached the device."""
        return sum(operation.launches for operation in self.operations)

    @property
    def waits(self) -> int:
        """How often the host waited."""
        return sum(operation.waits for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Read and written by all launches."""
        return sum(operation.bytes for operation in self.operations)

    @property
    def flops(self) -> dict[torch.dtype, int]:
        """Of matrix products, by the dtype of their factors."""
        found: Counter[torch.dtype] = Counter()
        for operation in self.operations:
            if operation.flops:
                found[operation.dtype] += operation.flops
        return dict(found)

    @property
    def names(self) -> Counter[str]:
        """How often each operation was launched."""
        return Counter(operation.name for operation in self.operations if operation.launches)


def why_not() -> str | None:
    """What is missing to build the device, or nothing."""
    compiler = os.environ.get("CXX", "c++")
    with mock.patch.dict(os.environ, PATH=_path()):
        missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} to build the simulated device with" if missing else None


def _path() -> str:
    """With the programs of this environment, which need not be activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


@functools.cache
def start() -> Any:
    """Builds the device if need be, and gives PyTorch the device type ``sim``.

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
    # The shapes of what C++ has no meta kernel for.
    importlib.import_module("torch._meta_registrations")
    return extension


def _module(extension: Any) -> types.ModuleType:
    """What ``torch.amp``, checkpointing and optimizers ask of ``torch.sim``."""
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
        # One generator for both: what saves the CPU's state has saved the device's.
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
    """Counts what happens within: on the device, by whatever thread."""
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
    """Counts without computing; tensors that are made within have no values, ever."""
    extension = start()
    before = extension.set_shape_only(True)
    try:
        yield
    finally:
        extension.set_shape_only(before)


@contextlib.contextmanager
def lag(launches: int) -> Iterator[None]:
    """Sets by how many launches the device is behind the host (10)."""
    extension = start()
    before = extension.set_lag(launches)
    try:
        yield
    finally:
        extension.set_lag(before)
