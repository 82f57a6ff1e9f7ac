"""Values that the host reads without stopping the device."""

import torch
from torch import Tensor


def can_copy(tensor: Tensor) -> bool:
    """Whether the values can come to the host: not those of a meta tensor or of a CUDA graph."""
    if tensor.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return not tensor.is_meta


class HostCopy:
    """The present values of a tensor, copied to the host while the device continues to work."""

    def __init__(self, tensor: Tensor) -> None:
        # PyTorch uses pinned memory here.
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._event = None if tensor.is_cpu else torch.Event(tensor.device)
        if self._event is not None:
            self._event.record()

    def read(self) -> Tensor:
        """Return the values; wait only if the copy is not finished."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
