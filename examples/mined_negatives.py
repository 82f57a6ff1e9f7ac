"""Train on hard negatives that BM25 finds, without those that are answers themselves.

python examples/mined_negatives.py prithivida/Splade_PP_en_v2
"""

import sys

import data
import torch

from sparse_losses import BM25Teacher, DocumentFrequency, InfoNCELoss, SpladeEncoder
from sparse_losses.functional import false_negative_mask

NEGATIVES = 4  # of a query; where BM25 finds fewer, the mask leaves out the rest


def mine(encoder: SpladeEncoder, pairs: list[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Add the wrong documents that share most with the query, without false negatives."""
    queries, documents = map(list, zip(*pairs, strict=True))
    columns = encoder.tokenize(queries), encoder.tokenize(documents)
    counts = DocumentFrequency(encoder.vocab_size)
    counts.update(**columns[1])
    scores = BM25Teacher(counts, special_token_ids=encoder.tokenizer.all_special_ids)(*columns)
    # A document that scores nearly as high as the right one is probably right, too.
    allowed = false_negative_mask(scores, ratio=0.95)
    allowed &= (scores > 0) & ~torch.eye(len(pairs), dtype=torch.bool, device=scores.device)
    best, found = scores.where(allowed, -torch.inf).topk(NEGATIVES)
    return [
        (*pair, [documents[i] for i in found[row][best[row].isfinite()]])
        for row, pair in enumerate(pairs)
    ]


def main(model: str = "prithivida/Splade_PP_en_v2", steps: int = 100) -> float:
    train, held_out = data.pairs()  # yours: (query, document)
    encoder = SpladeEncoder.from_pretrained(model, max_length=128)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    rows = mine(encoder, train)
    print(f"{sum(len(negatives) for *_, negatives in rows)} negatives of {len(rows)} queries")

    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    encoder.train()
    for queries, documents, lists in data.batches(rows, 8, steps):
        size = len(queries)
        padded = [text for own in lists for text in own + [""] * (NEGATIVES - len(own))]
        is_there = torch.tensor([[n < len(own) for n in range(NEGATIVES)] for own in lists])
        mask = torch.cat([torch.ones(size, size), is_there], 1).to(encoder.device)
        anchor, positive, negative = (
            encoder(**encoder.tokenize(texts)) for texts in (queries, documents, padded)
        )
        negative = negative.unflatten(0, (size, NEGATIVES))  # [B, N, V]: each query has its own
        loss = info_nce(anchor, positive, negative, candidate_mask=mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder.eval()
    print(f"Recall@10: {data.recall(encoder, held_out):.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:2])
