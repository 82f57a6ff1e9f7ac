"""Compile the head's kernels for a GPU, on a machine without one, and print their resources.

    python -m tools.compile_kernels [--capability 90]

The head runs on the CPU through its public function, with the settings for a GPU; a launch only
compiles its kernel to machine code. The output has all that a compiler knows: registers, spilled
bytes, shared memory, and the number of tensor-core instructions. It has no times.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass

# Shared memory that one block of threads may have, in bytes.
LARGEST = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and its resources."""

    kernel: str
    registers: int
    stack: int  # bytes of spilled registers and of arrays in local memory
    shared: int
    warps: int
    wgmma: int
    mma: int


class _Driver:
    """A driver of Triton for a GPU that does not exist."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def is_active(self) -> bool:
        return True


def compile_all(capability: int) -> list[Compiled]:
    """Compile every kernel that the samples launch, each signature once."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from sparse_losses.fast import triton_head
    from sparse_losses.representation import head
    from tests.representation.test_triton_head import sample

    driver.set_active(_Driver(capability))
    # These make the head believe that a GPU is present.
    head._runs_triton = lambda device: True
    triton_head.shared_memory = lambda device: LARGEST[capability]
    found: dict[tuple[str, str], Compiled] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options):
        options.pop("warmup", None)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        named = list(zip(self.arg_names, args, strict=False)) + list(options.items())
        signature = ", ".join(
            f"{name}:{str(value.dtype).removeprefix('torch.')}"
            if isinstance(value, torch.Tensor)
            else f"{name}={value}"
            for name, value in named
            if isinstance(value, torch.Tensor) or name.isupper() or name == "num_warps"
        )
        key = self.__name__, signature
        if key not in found:
            found[key] = _read(self.__name__, kernel)
        return kernel

    JITFunction.run = compile_only
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sample(dtype)
    return list(found.values())


def _read(name: str, kernel) -> Compiled:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    ptx = kernel.asm["ptx"]
    return Compiled(
        name,
        int(usage["REG"]),
        int(usage["STACK"]) + int(usage["LOCAL"]),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"\bmma\.sync", ptx)),
    )


def main(arguments: list[str] | None = None) -> int:
    """Print a line per kernel; return 1 if one spills or exceeds the shared memory."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--capability",
        type=int,
        choices=list(LARGEST),
        default=90,
        help="compute capability of the GPU: 80 is an A100, 90 an H100 or H200 (default)",
    )
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    kernels = compile_all(args.capability)
    print(f"{'kernel':24}{'warps':>6}{'registers':>10}{'spilled':>8}{'shared':>8}")
    bad = 0
    for kernel in kernels:
        is_bad = kernel.stack > 0 or kernel.shared > LARGEST[args.capability]
        bad += is_bad
        print(
            f"{kernel.kernel:24}{kernel.warps:6}{kernel.registers:10}"
            f"{kernel.stack:8}{kernel.shared:8}"
            + (f"  wgmma {kernel.wgmma}" if kernel.wgmma else "")
            + (f"  mma {kernel.mma}" if kernel.mma else "")
            + ("  TOO MUCH" if is_bad else "")
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
