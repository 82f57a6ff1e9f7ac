"""The scale of a head's logits: measured on a batch, and folded into the model's weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses.distributed import gather_rows
from sparse_losses.representation._language_model import evaluating

# The mean dot product of a text with itself: ours; queries of a trained SPLADE have about as much,
# and softmax at temperature 1 tells such products apart without being saturated.
SELF_DOT = 64.0
LARGEST = 14.0  # of the scale's logarithm


@torch.no_grad()
def measured_scale(weights_at: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return the first rank's scale that gives vectors ``[B, V]`` ``SELF_DOT``.

    It is 1 if none does, as behind a low soft cap, and NaN if all vectors are 0 or not finite.
    """
    low, high = like.new_full((2,), -LARGEST).unbind()
    high = -high
    for _ in range(30):
        middle = (low + high) / 2
        own = weights_at(middle.exp()).square().sum(1)
        found = own.sum() / (own > 0).sum()  # a NaN without any
        is_more = found > SELF_DOT
        low, high = torch.where(is_more, low, middle), torch.where(is_more, middle, high)
    is_reached = (found / SELF_DOT - 1).abs() < 0.1
    scale = torch.where(is_reached, middle.exp(), torch.where(found > 0, 1.0, torch.nan))
    return gather_rows(scale[None])[0]


@torch.no_grad()
def scaled_parameters(head: Any) -> list[Tensor]:
    """Return the last normalisation's parameters and the bias, if they multiply a head's logits."""
    layers: Any = head.transform or nn.Identity()
    norms = [x for x in layers.modules() if getattr(getattr(x, "weight", None), "ndim", 0) == 1]
    scaled = [y for x in norms[-1:] for y in (x.weight, getattr(x, "bias", None)) if y is not None]
    weight = head.weight
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1]).to(weight).reshape(2, 1, -1)
    with evaluating(layers):
        expected = 2.0 * layers(hidden)
        multiply(scaled, 2.0)
        error = (layers(hidden) - expected).abs().max() / expected.abs().max()
        multiply(scaled, 0.5)  # exact
    if not scaled or error > 2 * torch.finfo(weight.dtype).eps ** 0.5:
        return []
    return scaled if head.bias is None else [*scaled, head.bias]


@torch.no_grad()
def multiply(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply parameters in place."""
    for parameter in parameters:
        parameter.mul_(factor)
