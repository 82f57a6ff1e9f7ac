"""Pooling of given logits to sparse vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

import sparse_losses
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, ours, peer


def plain(logits: Tensor, attention_mask: Tensor) -> Tensor:
    """Maximum of ``log(1 + relu(logits))``, masked by a product, as in SPLADE v2."""
    activated = torch.log1p(torch.relu(logits)) * attention_mask[:, :, None].to(logits.dtype)
    return activated.max(1).values


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw logits, shifted so that the requested share of the maxima is positive."""
    rows, length, vocabulary = sizes["B"], sizes["S"], sizes["V"]
    mask = make.mask(rows, length)
    logits = make.normal(rows, length, vocabulary)
    pooled = torch.where(mask[:, :, None] > 0, logits, -torch.inf).amax(1)
    logits -= quantile(pooled, 1 - sizes["density"])
    return {"logits": logits, "attention_mask": mask, "upstream": make.uniform(rows, vocabulary)}


def quantile(x: Tensor, q: float) -> Tensor:
    """Return a quantile of a sample; ``torch.quantile`` does not accept large tensors."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // 1_000_000)].quantile(q)


def sentence_transformers(_: Inputs) -> Callable[..., Tensor]:
    """SpladePooling, in training mode."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    pooling = SpladePooling("max").train()
    return lambda logits, attention_mask: pooling(
        {"token_embeddings": logits, "attention_mask": attention_mask}
    )["sentence_embedding"]


def _size(rows: int, length: int, vocabulary: int, density: float, **more: str) -> Sizes:
    return {"B": rows, "S": length, "V": vocabulary, "density": density, **more}


_AIMED = [_size(8, 128, BERT, share) for share in (0.5, 0.05, 0.005)]

BENCHMARK = Benchmark(
    "splade_pool",
    inputs,
    ("logits",),
    plain,
    (*ours(sparse_losses.splade_pool), peer("sentence-transformers", sentence_transformers)),
    tiny=[_size(3, 5, 20, 0.3)],
    quick=[_size(rows, 64, BERT, 0.05) for rows in (1, 4)],
    full=[*_AIMED, _size(16, 256, BERT, 0.05), _size(2, 64, XLM, 0.005)],
    gpu=[_size(32, 256, BERT, 0.01, dtype="bf16")],
    aims=_AIMED,
)
