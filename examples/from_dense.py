"""Make a SPLADE model of a dense encoder, and train it.

python examples/from_dense.py sentence-transformers/all-MiniLM-L6-v2
"""

import sys

import data
import torch

from sparse_losses import Calibration, InfoNCELoss, SpladeEncoder, calibrate


def main(
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    steps: int = 100,
    folder: str = "my-retriever",
) -> Calibration:
    train, held_out = data.pairs()  # yours: (query, document)
    texts = [document for _, document in train]
    encoder = SpladeEncoder.from_dense(model, texts, start_active=256)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"Recall@10 before: {data.recall(encoder, held_out):.3f}")

    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=5e-5)  # its head is new
    encoder.train()
    for queries, documents in data.batches(train, 16, steps):
        loss = info_nce(
            encoder(**encoder.tokenize(queries)), encoder(**encoder.tokenize(documents))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder.eval()

    queries, documents = map(list, zip(*held_out, strict=True))
    found = calibrate(encoder, documents, 64, queries=queries, query_target=8)
    print(f"Recall@10 after training and pruning: {data.recall(encoder, held_out):.3f}")
    encoder.save_pretrained(folder)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
