"""A queue of features and labels of earlier batches, as further references for a loss."""

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_flag, check_integer, check_shapes, check_zero_one
from sparse_losses.distributed import agree_across_ranks, gather_rows, refuse_across_ranks


class LabelQueue(nn.Module):
    r"""First-in, first-out memory of the last ``size`` rows and their labels.

    Enqueue *after* the loss: otherwise the queue contains the batch itself, as positives of
    similarity 1. It is best to enqueue after the backward pass: PyTorch raises an error if
    ``features`` are overwritten while the graph of a loss still needs them.

    The queue never waits for the device and works under ``torch.compile(fullgraph=True)``.
    ``state_dict`` holds all of it, pointer and fill included, so training can resume.

    Args:
        size: Number of rows, Q.
        dim: Length of a feature, D.
        num_labels: Number of labels, L.
        gather: Whether every rank's rows are enqueued on every rank, in the order of the ranks, so
            that all ranks have the same queue. All ranks need the same batch size.

    Attributes:
        features: ``[Q, D]``, zeros in slots that were never filled.
        labels: ``[Q, L]``, multi-hot, in the dtype of the features; likewise zeros.
        mask: ``[Q]`` bool, the filled slots.

    Raises:
        ValueError: If a size is below 1.
        TypeError: If a size is not an integer, or ``gather`` is not a bool.

    Examples:
        >>> import torch
        >>> from sparse_losses import LabelQueue
        >>> from sparse_losses.functional import nws_loss
        >>> queue = LabelQueue(size=4, dim=2, num_labels=3)
        >>> prototype, labels = torch.randn(3, 2, requires_grad=True), torch.eye(3)
        >>> for features in (torch.ones(3, 2), 2 * torch.ones(3, 2)):
        ...     queued = {"queue": queue.features, "queue_labels": queue.labels}
        ...     loss = nws_loss(
        ...         features, labels, prototype, torch.eye(3), queue_mask=queue.mask, **queued
        ...     )
        ...     loss.backward()
        ...     queue.enqueue(features, labels)
        >>> queue.features[:, 0]
        tensor([2., 2., 1., 2.])

    References:
        He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020.
    """

    features: Tensor
    labels: Tensor
    pointer: Tensor
    fill: Tensor

    def __init__(self, size: int, dim: int, num_labels: int, *, gather: bool = False) -> None:
        super().__init__()
        for name, number in {"size": size, "dim": dim, "num_labels": num_labels}.items():
            check_integer(name, number, minimum=1)
        check_flag(gather=gather)
        self.size, self.dim, self.num_labels, self.gather = size, dim, num_labels, gather
        with torch.inference_mode(mode=False):  # its tensors could not be changed outside of it
            self.register_buffer("features", torch.zeros(size, dim))
            self.register_buffer("labels", torch.zeros(size, num_labels))
            self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
            self.register_buffer("fill", torch.zeros((), dtype=torch.int64))

    @property
    def mask(self) -> Tensor:
        """Return the filled slots, bool ``[Q]``."""
        return torch.arange(self.size, device=self.fill.device) < self.fill

    @torch.no_grad()
    def enqueue(self, features: Tensor, labels: Tensor) -> None:
        """Replace the oldest rows by those of a batch, in their order.

        Args:
            features: Floating point ``[B, D]``; stored without their graph, in the queue's dtype.
                If there are more than Q rows, the last Q are kept.
            labels: Multi-hot labels, bool, integer or float 0/1 ``[B, L]``.

        Raises:
            ValueError: If the shapes are not ``[B, D]`` and ``[B, L]``, the device is not the
                queue's, or a label is neither 0 nor 1 (checked on the CPU only).
            TypeError: If the features are not floating point or the labels complex.
        """
        call = "LabelQueue.enqueue"
        try:
            held = {"self.features": (self.features, "Q D"), "self.labels": (self.labels, "Q L")}
            check_shapes(**held, features=(features, "B D"), labels=(labels, "B L"))
            check_zero_one("labels", labels)
            if not features.is_floating_point():
                raise TypeError(f"expected `features` to be floating point, got {features.dtype}")
        except (TypeError, ValueError) as error:
            refuse_across_ranks(call, self.gather, (features, labels), error)
            raise
        features, labels = features.to(self.features.dtype), labels.to(self.labels.dtype)
        sizes = {"B": features.shape[0], "D": self.dim, "L": self.num_labels}
        agree_across_ranks(call, self.gather, features, **sizes)
        features, labels = (gather_rows(x, self.gather) for x in (features, labels))
        batch_size, kept = len(features), min(len(features), self.size)
        age = torch.arange(batch_size - kept, batch_size, device=self.pointer.device)
        slots = (self.pointer + age) % self.size
        self.features.index_copy_(0, slots, features[batch_size - kept :])
        self.labels.index_copy_(0, slots, labels[batch_size - kept :])
        self.pointer.add_(batch_size).remainder_(self.size)
        self.fill.add_(batch_size).clamp_(max=self.size)
