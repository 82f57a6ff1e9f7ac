"""Values that the host reads without stopping the device."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def can_copy(tensor: Tensor) -> bool:
    """Whether the values can come to the host: not those of a meta tensor or of a CUDA graph."""
    if tensor.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return not tensor.is_meta


class HostCopy(Generic[T]):
    """The present values of a tensor, copied to the host while the device continues to work.

    Read some steps later, they usually have come; if not, the device has work queued after the copy
    to stay busy while the host waits. ``make`` converts them to the result of ``read``.
    """

    def __init__(self, tensor: Tensor, make: Callable[[Tensor], T]) -> None:
        tensor = tensor.detach()
        self.is_here = tensor.device.type == "cpu"
        self._make = make
        self._event: torch.Event | None = None
        if self.is_here:
            self._values = tensor.clone()
            return
        self._values = tensor.to("cpu", non_blocking=True)  # PyTorch uses pinned memory here
        self._event = torch.Event(tensor.device)
        self._event.record()

    def read(self) -> T:
        """Return the values; wait only if the copy is not finished."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._make(self._values)
