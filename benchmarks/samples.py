"""``python -m benchmarks.samples``: every kernel runs once on small inputs, for a sanitizer.

The inputs are those that ``tools/compile_kernels.py`` compiles the kernels for.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Says what ran, so that a run that is stopped shows how far it came."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.samples", description=__doc__)
    options.add_argument("operations", nargs="*", metavar="OPERATION")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options.add_argument("--dtypes", default="bfloat16,float32,float16")
    args = options.parse_args(arguments)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        # A sanitizer sees the bounds of an allocation, not those of a tensor within one.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch

    from tools.compile_kernels import OPERATIONS
    from tools.on_device import on_device

    if unknown := [name for name in args.operations if name not in OPERATIONS]:
        options.error(f"no such operation: {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available; --device cpu runs them in the interpreter")
    for name in args.dtypes.split(","):
        for operation in args.operations or OPERATIONS:
            sample = importlib.import_module(f"tests.kernels.test_{operation}").sample
            torch.manual_seed(0)
            with on_device(args.device):
                sample(getattr(torch, name))
            if args.device == "cuda":
                torch.cuda.synchronize()
            print(f"{operation}, {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
