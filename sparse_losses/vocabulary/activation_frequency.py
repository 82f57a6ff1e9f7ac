"""How many texts activate each dimension: counted on the device while a model trains."""

import math
from typing import Self

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_integer, check_number, check_shapes
from sparse_losses._core.entries import entries_of
from sparse_losses.distributed import agree_across_ranks, sum_over_ranks


class ActivationFrequency(nn.Module):
    r"""Counter of the share of texts that activate each dimension, its posting list's length.

    $$f_j = \frac{\sum_b d^{a_b} n_{bj}}{\sum_b d^{a_b} B_b} \qquad
    w_j = \frac{1}{1 + \bigl(f_j^{\log_\alpha 2} - 1\bigr)^\beta}$$

    $n_{bj}$ of the $B_b$ texts of batch $b$ activate dimension $j$; the batch is $a_b$ batches old.
    $d$ is ``decay``; without it $d$ is 1 and $f$ is exact. $w$ is the weight of DF-FLOPS: 0 at
    $f_j = 0$, one half at $f_j = \alpha$, 1 at $f_j = 1$. It stands inside the square:
    ``flops_loss`` takes $w^2$. A text with a NaN does not count. Nothing waits for the device.

    Args:
        vocab_size: number of dimensions, V.
        decay: ``d``, between 0 and 1, for an exponential average over batches.

    Examples:
        >>> import torch
        >>> from sparse_losses import ActivationFrequency, FlopsLoss
        >>> frequency = ActivationFrequency(vocab_size=3)
        >>> flops = FlopsLoss(token_weight=torch.ones(3))
        >>> frequency.update(torch.tensor([[0.5, 0.0, 2.0], [0.0, 0.0, 1.0]]))
        >>> frequency.frequency()
        tensor([0.5000, 0.0000, 1.0000])
        >>> flops.token_weight.copy_(frequency.penalty(alpha=0.5) ** 2)
        tensor([0.2500, 0.0000, 1.0000])

    References:
        An Alternative to FLOPS Regularization to Effectively Productionize SPLADE-Doc.
    """

    active: Tensor
    num_texts: Tensor
    own_active: Tensor
    own_num_texts: Tensor

    def __init__(self, vocab_size: int, *, decay: float | None = None) -> None:
        super().__init__()
        check_integer("vocab_size", vocab_size, minimum=1)
        if decay is not None:
            _check_share("decay", decay)
        self.vocab_size, self.decay = int(vocab_size), decay
        dtype = torch.int64 if decay is None else torch.float32
        with torch.inference_mode(mode=False):  # its tensors could not be changed outside of it
            for prefix in ("", "own_"):  # of all ranks, and of this rank since `all_reduce`
                self.register_buffer(f"{prefix}active", torch.zeros(self.vocab_size, dtype=dtype))
                self.register_buffer(f"{prefix}num_texts", torch.zeros((), dtype=dtype))

    @torch.no_grad()
    def update(self, activations: Tensor) -> None:
        """Count a batch ``[B, V]``, a text per row, dense or CSR; entries > 0 are active."""
        check_shapes(activations=(activations, "B V, csr"), **{"self.active": (self.active, "V")})
        if self.decay is not None:
            for total in self.buffers():
                total.mul_(self.decay)
        if activations.layout == torch.sparse_csr:
            entries, dtype = entries_of(activations), self.active.dtype
            is_number = entries.sum_rows(len(activations), entries.value.isnan().to(dtype)) == 0
            is_active = (entries.value > 0) & is_number[entries.row]
            active = entries.sum_columns(self.vocab_size, is_active.to(dtype))
        else:
            is_number = ~activations.isnan().any(1)
            active = ((activations > 0) & is_number[:, None]).sum(0)
        self.own_active.add_(active)
        self.own_num_texts.add_(is_number.sum())

    def merge(self, other: "ActivationFrequency") -> Self:
        """Add the counts of ``other``, of the same size and decay, and return this counter."""
        if self.extra_repr() != other.extra_repr():
            raise ValueError(f"expected `other` with {self.extra_repr()}, got {other.extra_repr()}")
        for total, more in zip(self.buffers(), other.buffers(), strict=True):
            total.add_(more.to(total.device))
        return self

    @torch.no_grad()
    def all_reduce(self) -> Self:
        """Add what the other ranks counted since the last call; return this counter."""
        own = torch.cat([self.own_active, self.own_num_texts[None]])
        same = {"V": self.vocab_size, "`decay`": self.decay}
        agree_across_ranks("ActivationFrequency.all_reduce", True, own, **same)
        counts = sum_over_ranks(own)
        self.active.add_(counts[:-1])
        self.num_texts.add_(counts[-1])
        self.own_active.zero_()
        self.own_num_texts.zero_()
        return self

    def frequency(self) -> Tensor:
        """Return the share of the texts that activate each dimension, fp32 ``[V]``, 0 at first."""
        num_texts = (self.num_texts + self.own_num_texts).float()
        active = (self.active + self.own_active).float()
        return active / torch.where(num_texts > 0, num_texts, 1.0)

    def penalty(self, alpha: float = 0.1, beta: float = 10.0) -> Tensor:
        """Return DF-FLOPS' weight ``w``, fp32 ``[V]`` in [0, 1].

        Args:
            alpha: the frequency whose weight is one half, between 0 and 1.
            beta: steepness of the weight there, > 0.
        """
        _check_share("alpha", alpha)
        check_number("beta", beta, minimum=0.0, exclusive=True)
        above_one = self.frequency().pow(math.log(2) / math.log(alpha)) - 1
        return 1 / (1 + above_one.clamp(min=0.0).pow(beta))

    def extra_repr(self) -> str:
        """Return the hyperparameters."""
        return f"vocab_size={self.vocab_size}, decay={self.decay}"


def _check_share(name: str, value: float) -> None:
    check_number(name, value, minimum=0.0, exclusive=True)
    if value >= 1:
        raise ValueError(f"expected `{name}` below 1, got {value!r}")
