"""The SPLADE head of this package inside sentence-transformers' ``SparseEncoder``."""

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_number
from sparse_losses._core.extras import from_extra
from sparse_losses.representation._language_model import evaluating, projection_of, unwrapped
from sparse_losses.representation.head import SpladeHead

with from_extra("sentence-transformers"):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer


def use_splade_head(sparse_encoder: Any, *, logit_scale: float = 1.0) -> Any:
    """Compute the vectors of a ``SparseEncoder`` by ``splade_head``; return the encoder.

    ``[B, S, V]`` is then never stored, and vectors and gradients are the same. They are fp32, also
    where the model is in half precision. The pooling's ``chunk_size`` has no effect. The saved
    folder is the same as without the head.

    Call it again after anything that replaces the projection, such as ``resize_token_embeddings``
    or adapters on it. Several GPUs need one process each.

    Args:
        sparse_encoder: a ``SparseEncoder`` of a fill-mask ``Transformer`` and
            ``SpladePooling("max")``, or of a ``Router`` with such sides. It is changed in place.
        logit_scale: a factor > 0 on the logits, of models whose head has a large norm. It is
            multiplied into the model's weights, which a folder saves: pass it once.

    Raises:
        TypeError: for other modules, for a model that ``SpladeHead.from_masked_lm`` does not take,
            for a ``forward`` that something else has replaced, and for a ``logit_scale`` of a model
            whose projection does not follow a normalisation.
        ValueError: for another pooling than the maximum.

    Examples:
        ``model = use_splade_head(SparseEncoder("naver/splade-v3"))``
    """
    remove_splade_head(sparse_encoder)
    check_number("logit_scale", logit_scale, minimum=0.0, exclusive=True)
    replaced = []
    for transformer, pooling in _pairs(sparse_encoder):
        model = unwrapped(transformer.auto_model)
        for module in (model, pooling):
            if "forward" in vars(module):
                raise TypeError(
                    f"expected the `forward` of {type(module).__name__} itself, got one that "
                    "another package has put in its place"
                )
        head = SpladeHead.from_masked_lm(model, activation=pooling.activation_function)
        if logit_scale != 1.0:
            _scale(model, head, logit_scale)
        layer = projection_of(model)
        replaced.append((model, partial(_hidden_states, model)))
        replaced.append((pooling, partial(_pooled, pooling, model, layer, head)))
    for module, function in replaced:
        module.forward = function
    return sparse_encoder


def remove_splade_head(sparse_encoder: Any) -> Any:
    """Undo ``use_splade_head`` in place, if it was used, and return the encoder.

    Examples:
        ``model = remove_splade_head(model)``
    """
    for transformer, pooling in _pairs(sparse_encoder):
        for module in (unwrapped(transformer.auto_model), pooling):
            function = getattr(vars(module).get("forward"), "func", None)
            if function in (_hidden_states, _pooled):
                del module.forward
    return sparse_encoder


def _pairs(sparse_encoder: Any) -> list[tuple[Any, Any]]:
    """Return each transformer with the pooling that follows it."""
    if not isinstance(sparse_encoder, SparseEncoder):
        raise TypeError(f"expected a SparseEncoder, got {type(sparse_encoder).__name__}")
    chains = [x for x in sparse_encoder.modules() if isinstance(x, nn.Sequential)]  # of a Router
    neighbours = [pair for chain in chains for pair in itertools.pairwise([*chain, None])]
    pairs = [pair for pair in neighbours if isinstance(pair[0], Transformer)]
    for transformer, pooling in pairs:
        if type(pooling) is not SpladePooling:
            before, after = type(transformer).__name__, type(pooling).__name__
            raise TypeError(f"expected SpladePooling after {before}, got {after}")
        if pooling.pooling_strategy != "max":
            raise ValueError(
                f'expected pooling_strategy="max", got {pooling.pooling_strategy!r}: the sum over '
                "positions needs the logits of all of them"
            )
    if not pairs:
        raise TypeError("expected a SparseEncoder with a fill-mask Transformer, got none in it")
    return pairs


@torch.no_grad()
def _scale(model: Any, head: SpladeHead, factor: float) -> None:
    """Multiply the logits by a factor, in the last normalisation and the bias."""
    layers: Any = head.transform or nn.Identity()
    weight = head.weight
    norms = [x for x in layers.modules() if getattr(getattr(x, "weight", None), "ndim", 0) == 1]
    scaled = [y for x in norms[-1:] for y in (x.weight, getattr(x, "bias", None)) if y is not None]
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1]).to(weight).reshape(2, 1, -1)
    with evaluating(model):
        expected = factor * layers(hidden)
        for x in scaled:
            x.mul_(factor)
        error = (layers(hidden) - expected).abs().max() / expected.abs().max()
    if not scaled or error > 2 * torch.finfo(weight.dtype).eps ** 0.5:
        for x in scaled:
            x.div_(factor)
        kind = type(model).__name__
        raise TypeError(f"expected a normalisation before the projection of {kind}, got none")
    if head.bias is not None:
        head.bias.mul_(factor)


def _hidden_states(model: Any, **inputs: Any) -> Any:
    """Return hidden states in the place of the logits."""
    from transformers.modeling_outputs import MaskedLMOutput

    output = model.base_model(**inputs)
    return MaskedLMOutput(logits=output[0], hidden_states=output.get("hidden_states"))


def _pooled(
    pooling: Any, model: Any, layer: Any, head: SpladeHead, features: dict[str, Any]
) -> dict[str, Any]:
    """Do what the pooling does, for hidden states in the place of logits."""
    if projection_of(model) != layer or len(layer.weight) != len(head.weight):
        raise RuntimeError(
            "expected the vocabulary projection that `use_splade_head` found, got another: call "
            "`use_splade_head` again after resizing embeddings or adding adapters"
        )
    if layer.weight is not head.weight:  # FSDP2 has others within a step
        head.weight, head.bias = layer.weight, layer.bias
    hidden, attention_mask = features["token_embeddings"], features.get("attention_mask")
    if "cu_seq_lens_q" in features:
        hidden, attention_mask = _padded(hidden[0], features["cu_seq_lens_q"])
    vectors = head(hidden, attention_mask)
    if getattr(pooling, "embedding_dimension", 0) is None:
        pooling.embedding_dimension = vectors.shape[1]
    features["sentence_embedding"] = vectors
    return features


def _padded(flat: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states ``[B, S, H]`` and their mask from the texts' states in a row."""
    lengths = ends.diff()
    hidden = nn.utils.rnn.pad_sequence(list(torch.split(flat, lengths.tolist())), batch_first=True)
    positions = torch.arange(hidden.shape[1], device=lengths.device)
    return hidden, positions < lengths[:, None]
