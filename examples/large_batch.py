"""Train with 4,096 pairs in a batch on one GPU, by gradient caching.

python examples/large_batch.py prithivida/Splade_PP_en_v2
"""

import sys
from collections.abc import Callable

import data
import torch

from sparse_losses import InfoNCELoss, SpladeEncoder


def cached_backward(
    encoder: SpladeEncoder,
    columns: list[list[str]],
    loss: Callable[..., torch.Tensor],
    size: int,
) -> torch.Tensor:
    """Backpropagate the loss of whole columns of texts, `size` texts at a time."""
    seed = int(torch.randint(2**31, ()))  # so that dropout draws the same numbers both times
    parts = [
        [encoder.tokenize(column[start : start + size]) for start in range(0, len(column), size)]
        for column in columns
    ]
    torch.manual_seed(seed)
    with torch.no_grad():
        vectors = [torch.cat([encoder(**part) for part in column]) for column in parts]
    total = loss(*(x.requires_grad_() for x in vectors))
    total.backward()  # to the vectors
    torch.manual_seed(seed)
    for column, x in zip(parts, vectors, strict=True):
        for part, gradient in zip(column, x.grad.split(size), strict=True):
            encoder(**part).backward(gradient)
    return total.detach()


def main(
    model: str = "prithivida/Splade_PP_en_v2",
    steps: int = 100,
    batch: int = 4096,
    size: int = 64,
) -> float:
    train, held_out = data.pairs()  # yours: (query, document)
    batch = min(batch, len(train))
    encoder = SpladeEncoder.from_pretrained(model, max_length=128)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    encoder.train()
    for queries, documents in data.batches(train, batch, steps):
        loss = cached_backward(encoder, [queries, documents], info_nce, size)
        optimizer.step()
        optimizer.zero_grad()
    encoder.eval()
    print(f"{batch} pairs, Recall@10: {data.recall(encoder, held_out):.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:2])
