"""A dense encoder as a masked language model whose head starts as the identity."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses.representation._language_model import evaluating, head_of, projection_of

ABOVE = 3.0  # from here on GELU, and activations like it, are the identity
MOST = 8.0  # the largest constant: bf16 rounds what lies around it to steps of 1/16


def check_untrained(name: str, model: Any, missing: Collection[str]) -> None:
    """Raise unless the weights of a masked language model's head are missing in its checkpoint."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    own = [key for key, x in model.named_parameters() if id(x) not in base and x.ndim > 1]
    if trained := sorted(set(own) - set(missing)):
        got = ", ".join(trained)
        how = "SpladeEncoder.from_pretrained loads it"
        raise ValueError(f"expected {name} to have no trained head, got {got}: {how}")


@torch.no_grad()
def set_identity_head(model: Any, input_ids: Tensor, attention_mask: Tensor) -> None:
    """Let the logits of a masked language model be dot products of states and word embeddings.

    Its head is a linear layer, an activation and a layer norm. The linear layer adds a constant, so
    that the activation changes nothing; the norm takes the constant off again, and its gain is the
    mean standard deviation of the states of the given tokens.
    """
    transform, projection = head_of(model).transform, projection_of(model)
    layers = [] if transform is None else [x for x in transform.modules() if not [*x.children()]]
    linear = [x for x in layers if isinstance(x, nn.Linear)]
    norms: Any = [x for x in layers if "norm" in type(x).__name__.lower()]
    embeddings, what = model.get_input_embeddings().weight, type(model).__name__
    size = embeddings.shape[1]
    if len(linear) != 1 or len(norms) != 1 or linear[0].weight.shape != (size, size):
        found = ", ".join(type(layer).__name__ for layer in layers) or "no layers"
        raise TypeError(
            f"expected a head of one Linear [{size}, {size}], as wide as the word embeddings, an "
            f"activation and one layer norm, got {found} in {what}"
        )
    if linear[0].bias is None or projection.bias is None:
        raise TypeError(f"expected a head whose linear layers have biases, got none in {what}")
    with evaluating(model):
        output = model.base_model(input_ids=input_ids, attention_mask=attention_mask)
    states = output[0][attention_mask.bool()].float()
    lowest = states.amin(1).quantile(0.1).item()
    nn.init.eye_(linear[0].weight)
    nn.init.constant_(linear[0].bias, min(ABOVE - lowest, MOST))
    norms[0].weight.fill_(states.std(1).mean().item())
    for bias in (getattr(norms[0], "bias", None), projection.bias):
        if bias is not None:
            bias.zero_()
    if projection.weight is not embeddings:
        projection.weight.copy_(embeddings)
