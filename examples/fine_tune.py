"""Fine-tune a trained SPLADE model on your own pairs, and prune it.

python examples/fine_tune.py prithivida/Splade_PP_en_v2
"""

import sys

import data
import torch

from sparse_losses import Calibration, InfoNCELoss, SpladeEncoder, calibrate


def main(
    model: str = "prithivida/Splade_PP_en_v2", steps: int = 100, folder: str = "my-retriever"
) -> Calibration:
    train, held_out = data.pairs()  # yours: (query, document)
    encoder = SpladeEncoder.from_pretrained(model, max_length=128)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"Recall@10 before: {data.recall(encoder, held_out):.3f}")

    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)  # keeps what it knows
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    encoder.train()
    for queries, documents in data.batches(train, 16, steps):
        anchor = encoder(**encoder.tokenize(queries))
        positive = encoder(**encoder.tokenize(documents))
        loss = info_nce(anchor, positive)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    encoder.eval()
    print(f"Recall@10 after training: {data.recall(encoder, held_out):.3f}")

    queries, documents = map(list, zip(*held_out, strict=True))
    found = calibrate(encoder, documents, 64, queries=queries, query_target=8)
    print(f"Recall@10 after pruning: {data.recall(encoder, held_out):.3f}")
    encoder.save_pretrained(folder)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
