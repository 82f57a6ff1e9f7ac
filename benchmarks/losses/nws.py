"""NWS: labelled queries with keys, a queue and prototypes."""

import torch
import torch.nn.functional as nnf
from torch import Tensor

import sparse_losses
from benchmarks.schema import Benchmark, Inputs, Maker, Sizes, ours


def plain(
    query: Tensor,
    query_labels: Tensor,
    prototype: Tensor,
    label_similarity: Tensor,
    *,
    key: Tensor,
    key_labels: Tensor,
    queue: Tensor,
    queue_labels: Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float = 0.07,
    eps: float = 1e-8,
) -> Tensor:
    """The broadcast form: every sum over labels is over a tensor ``[B, R, L]``."""
    labels = query_labels
    instances, instance_labels = torch.cat([key, queue]), torch.cat([key_labels, queue_labels])
    count = labels.sum(-1, keepdim=True)
    both = labels[:, None] * instance_labels[None]
    union = torch.maximum(labels[:, None], instance_labels[None]).sum(-1)
    overlap = alpha / union.clamp(min=1)
    share = (overlap[:, :, None] * instance_labels[None]).sum(1) + 1 - alpha / count
    share = labels * share
    per_label = labels / (torch.where(share <= 1e-6, 1.0, share) + eps)
    weight = overlap * (both * per_label[:, None]).sum(-1)
    similarity = ((labels @ label_similarity)[:, None] * instance_labels[None]).sum(-1)
    similarity = similarity / (count * instance_labels.sum(-1) + eps)

    weight = torch.cat([weight, per_label], dim=1)
    is_negative = torch.cat([both.sum(-1) == 0, labels == 0], dim=1)
    unlike = torch.cat([beta * (1 - similarity).clamp(0, 1), torch.ones_like(labels)], dim=1)
    references = nnf.normalize(torch.cat([instances, prototype]), dim=-1)
    scores = nnf.normalize(query, dim=-1) @ references.T / temperature
    highest = scores.amax(-1, keepdim=True)
    total = (is_negative * unlike * (scores - highest).exp()).sum(-1, keepdim=True)
    log_denominator = highest + (total + eps).log()
    return ((weight * (log_denominator - scores)).sum(-1) / (count[:, 0] + eps)).mean()


def inputs(sizes: Sizes, make: Maker) -> Inputs:
    """Draw rows with about three labels, at least one."""
    num_labels, width = sizes["L"], sizes["F"]

    def labels(rows: int) -> Tensor:
        some = make.uniform(rows, num_labels) < min(3 / num_labels, 0.4)
        return some.scatter(1, make.integers(num_labels, rows, 1), True).to(make.dtype)

    similarity = make.uniform(num_labels, num_labels)
    similarity = torch.maximum(similarity, similarity.T)
    similarity.fill_diagonal_(1.0)
    return {
        "query": make.normal(sizes["B"], width),
        "query_labels": labels(sizes["B"]),
        "prototype": make.normal(num_labels, width),
        "label_similarity": similarity,
        "key": make.normal(sizes["K"], width),
        "key_labels": labels(sizes["K"]),
        "queue": make.normal(sizes["Q"], width),
        "queue_labels": labels(sizes["Q"]),
    }


def _size(rows: int, queue: int, width: int, labels: int, **more: str) -> Sizes:
    return {"B": rows, "K": rows, "Q": queue, "F": width, "L": labels, **more}


_LARGE = [_size(256, 8192, 128, 128), _size(64, 8192, 128, 512)]

BENCHMARK = Benchmark(
    "nws",
    inputs,
    ("query", "prototype"),
    plain,
    ours(sparse_losses.nws_loss),
    tiny=[{"B": 4, "K": 3, "Q": 5, "F": 6, "L": 4}],
    quick=[_size(8, 512, 128, 128), _size(32, 2048, 128, 128)],
    full=_LARGE,
    gpu=[  # the first has 66,048 references: keys, queue and prototypes
        _size(1024, 64_512, 256, 512, dtype="bf16"),
        _size(256, 8192, 128, 128, dtype="fp32"),
        _size(32, 2048, 128, 128, dtype="bf16"),
    ],
    aims=_LARGE,
    plain_bytes=lambda sizes: (
        4.0 * 4 * sizes["B"] * (sizes["K"] + sizes["Q"] + sizes["L"]) * sizes["L"]
    ),
)
