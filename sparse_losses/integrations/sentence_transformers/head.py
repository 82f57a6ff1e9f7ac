"""The SPLADE head of this package inside sentence-transformers' ``SparseEncoder``."""

import itertools
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from sparse_losses._core.checks import check_choice, check_number
from sparse_losses._core.extras import from_extra
from sparse_losses.representation._language_model import unwrapped, warn_of_adapters
from sparse_losses.representation.head import SpladeHead
from sparse_losses.representation.scale import multiply, scaled_parameters

with from_extra("sentence-transformers"):
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
    from transformers.modeling_outputs import MaskedLMOutput


def use_splade_head(
    sparse_encoder: Any,
    *,
    layout: torch.layout = torch.strided,
    logit_scale: float | Literal["auto"] = 1.0,
) -> Any:
    """Compute the vectors of a ``SparseEncoder`` by ``splade_head``; return the encoder.

    ``[B, S, V]`` is then never stored; vectors, which are fp32, gradients and the saved folder are
    the same, and the pooling's ``chunk_size`` has no effect. Call it again after what replaces the
    projection, such as ``resize_token_embeddings``. Several GPUs need one process each.

    Args:
        sparse_encoder: a ``SparseEncoder`` of a fill-mask ``Transformer`` and
            ``SpladePooling("max")``, or of a ``Router`` with such sides. It is changed in place.
        layout: of the vectors in training mode. With ``torch.sparse_csr`` no ``[B, V]`` is stored:
            for a ``SentenceTransformersLoss`` of a loss that takes CSR tensors, without
            mini-batches, and not inside ``SpladeLoss``. In evaluation mode vectors are dense.
        logit_scale: a factor > 0 on the logits, of models whose head has a large norm. It is
            multiplied into the model's weights, which a folder saves: pass it once. ``"auto"``
            measures it on the first batch in training mode, as ``SpladeHead`` does. The model needs
            a normalisation before its projection.

    Examples:
        ``model = use_splade_head(SparseEncoder("naver/splade-v3"))``
    """
    scaled = set()
    check_choice("layout", layout, (torch.strided, torch.sparse_csr))
    if logit_scale != "auto":
        check_number("logit_scale", logit_scale, minimum=0.0, exclusive=True)
    # Each transformer with the pooling that follows it; a Router has several.
    chains = [x for x in sparse_encoder.modules() if isinstance(x, nn.Sequential)]
    neighbours = [pair for chain in chains for pair in itertools.pairwise([*chain, None])]
    pairs: list[Any] = [pair for pair in neighbours if isinstance(pair[0], Transformer)]
    for _, pooling in pairs:
        if type(pooling) is not SpladePooling or pooling.pooling_strategy != "max":
            raise TypeError(f'expected SpladePooling("max") after the Transformer, got {pooling!r}')
    if not pairs:
        raise TypeError(f"expected a SparseEncoder of a Transformer, got {type(sparse_encoder)}")
    for transformer, pooling in pairs:
        model = unwrapped(transformer.auto_model)
        if getattr(vars(model).get("forward"), "func", None) is _hidden_states:
            del model.forward  # of an earlier call
        head = SpladeHead.from_masked_lm(model, activation=pooling.activation_function)
        if logit_scale != 1.0 and model not in scaled:  # of both sides of a Router
            scaled.add(model)
            if not (parameters := scaled_parameters(head)):
                raise TypeError(f"expected a normalisation before the projection of {type(model)}")
            warn_of_adapters(transformer.auto_model, "the scale")
            if logit_scale == "auto":
                head._await_scale(fold=True)
            else:
                multiply(parameters, logit_scale)
        pooling.layout, model.forward = layout, partial(_hidden_states, model)
        pooling.forward = partial(_pooled, pooling, model, head)
    return sparse_encoder


def _hidden_states(model: Any, **inputs: Any) -> Any:
    """Return hidden states in the place of the logits."""
    output = model.base_model(**inputs)
    return MaskedLMOutput(logits=output[0], hidden_states=output.get("hidden_states"))


def _pooled(pooling: Any, model: Any, head: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Do what the pooling does, for hidden states in the place of logits."""
    head.follow(model, "call `use_splade_head` again")
    hidden, attention_mask = features["token_embeddings"], features.get("attention_mask")
    if "cu_seq_lens_q" in features:  # the texts' states in a row, without padding
        texts = hidden[0].split(features["cu_seq_lens_q"].diff().tolist())
        hidden = pad_sequence(list(texts), batch_first=True)
        attention_mask = pad_sequence([x.new_ones(len(x)) for x in texts], batch_first=True)
    head.training = model.training
    if head.awaits_scale and head.training and not head._can_fold():
        raise RuntimeError("expected a batch in training mode, for the scale, before fully_shard")
    layout = pooling.layout if model.training else torch.strided
    features["sentence_embedding"] = vectors = head(hidden, attention_mask, layout=layout)
    if getattr(pooling, "embedding_dimension", 0) is None:
        pooling.embedding_dimension = vectors.shape[1]
    return features
