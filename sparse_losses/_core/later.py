"""Values that the host reads without stopping the device."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Later"]

T = TypeVar("T")


class Later(Generic[T]):
    """What a tensor holds now, copied to the host while the device works on.

    On the CPU it is there at once. From an accelerator it goes into pinned memory, without a wait,
    and is read some steps later: by then the device has long passed the place of the copy, or has
    enough queued behind it not to run dry if the host does wait.

    Args:
        tensor: may be overwritten afterwards.
        make: turns its values, on the CPU, into what ``read`` returns.
    """

    def __init__(self, tensor: Tensor, make: Callable[[Tensor], T]) -> None:
        tensor = tensor.detach()
        self.is_here = tensor.device.type == "cpu"
        self._make = make
        self._event: torch.Event | None = None
        if self.is_here:
            self._values = tensor.clone()
            return
        self._values = tensor.to("cpu", non_blocking=True)  # PyTorch takes pinned memory for this
        self._event = torch.Event(tensor.device)
        self._event.record()

    def read(self) -> T:
        """The values; waits only where the device has not made the copy yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._make(self._values)
