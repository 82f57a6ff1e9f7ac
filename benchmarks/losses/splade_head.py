"""The head: projection to the vocabulary and pooling."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.losses import splade_pool
from benchmarks.schema import BERT, XLM, Benchmark, Inputs, Maker, Sizes, Variant, ours, peer


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """Project to the vocabulary, then pool."""
    return splade_pool.plain(hidden @ weight.T + bias, attention_mask)


def draw_hidden(make: Maker, rows: int, length: int, width: int) -> Tensor:
    """Draw Gaussian hidden states with layer normalisation."""
    return nnf.layer_norm(make.normal(rows, length, width), (width,))


def draw_weight(make: Maker, vocabulary: int, width: int) -> Tensor:
    """Draw a weight as masked language models initialise it."""
    return make.normal(vocabulary, width).mul_(0.02)


def pooled(hidden: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Return pooled scores without a bias, to know their distribution."""
    rows = [
        (h @ weight.T).masked_fill(m[:, None] == 0, -torch.inf).amax(0)
        for h, m in zip(hidden, mask, strict=True)
    ]
    return torch.stack(rows)


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw the inputs, with a bias for which the requested share of the vectors is active."""
    rows, vocabulary, width = sizes["B"], sizes["V"], sizes["H"]
    hidden = draw_hidden(make, rows, sizes["S"], width)
    mask = make.mask(rows, sizes["S"], sizes.get("mask", 0.75))
    weight = draw_weight(make, vocabulary, width)
    noise = 0.02 * make.normal(vocabulary)
    scores = pooled(hidden, weight, mask) + noise
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": noise - splade_pool.quantile(scores, 1 - sizes["density"]),
        "attention_mask": mask,
        "upstream": make.uniform(rows, vocabulary),
    }


def sentence_transformers(made: Inputs) -> Callable[..., Tensor]:
    """A linear layer, then SpladePooling."""
    pool = splade_pool.sentence_transformers(made)
    return lambda hidden, weight, bias, attention_mask: pool(
        nnf.linear(hidden, weight, bias), attention_mask
    )


def _size(rows: int, length: int, vocabulary: int, density: float, width: int = 768) -> Sizes:
    return {"B": rows, "S": length, "V": vocabulary, "H": width, "density": density}


def _gpu(rows: int, length: int, vocabulary: int, density: float, dtype: str) -> Sizes:
    """Return sizes for a GPU; two thirds of the positions are tokens, as in real batches."""
    return {**_size(rows, length, vocabulary, density), "mask": 0.67, "dtype": dtype}


_LARGE = [
    *[_size(8, 128, BERT, share) for share in (0.5, 0.05, 0.005)],
    _size(2, 64, XLM, 0.005),
    _size(16, 256, BERT, 0.005),
]

# How forward and backward grow with the share of active entries, for long and for short texts.
_SHARES = [
    _size(8, length, BERT, share) for length in (128, 16) for share in (0.001, 0.01, 0.1, 1.0)
]

# States and weight in bf16, as in a model of that dtype.
_HALVES = [
    {**_size(*sizes), "dtype": "bf16"} for sizes in ((8, 128, BERT, 0.01), (2, 64, XLM, 0.005))
]

BENCHMARK = Benchmark(
    "splade_head",
    inputs,
    ("hidden", "weight", "bias"),
    plain,
    (
        *ours(sparse_losses.splade_head),
        Variant("ours, CSR", functools.partial(sparse_losses.splade_head, layout=torch.sparse_csr)),
        Variant(
            "ours, sparse_grad", functools.partial(sparse_losses.splade_head, sparse_grad=True)
        ),
        peer("sentence-transformers", sentence_transformers),
    ),
    tiny=[_size(3, 5, 40, 0.3, width=8)],
    quick=[_size(1, 32, BERT, 0.05), _size(4, 64, BERT, 0.05)],
    full=[*_LARGE, *_SHARES, *_HALVES],
    gpu=[
        *[_gpu(32, 256, vocabulary, 0.01, "bf16") for vocabulary in (BERT, XLM)],
        *[_gpu(32, 256, BERT, share, "bf16") for share in (0.001, 0.1, 1.0)],
        _gpu(8, 128, BERT, 0.01, "fp32"),
        _gpu(2, 32, BERT, 0.01, "bf16"),
    ],
    calculated=[_gpu(64, 256, vocabulary, 0.01, "bf16") for vocabulary in (BERT, XLM)],
    aims=_LARGE,
    plain_bytes=lambda sizes: 4.0 * (5 * sizes["B"] * sizes["S"] + 2 * sizes["H"]) * sizes["V"],
    # The arg-max may differ between positions whose scores are almost equal in fp32; the fp64 check
    # of a small copy has no such ties.
    tolerance=2e-2,
)
