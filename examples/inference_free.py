"""Train documents for queries that need no model: each of their tokens has one learned weight.

python examples/inference_free.py prithivida/Splade_PP_en_v2
"""

import sys

import data
import torch

from sparse_losses import (
    DocumentFrequency,
    InfoNCELoss,
    SpladeEncoder,
    StaticQueryEncoder,
    calibrate,
)


def main(
    model: str = "prithivida/Splade_PP_en_v2", steps: int = 100, folder: str = "my-router"
) -> list[dict[str, float]]:
    train, held_out = data.pairs()  # yours: (query, document)
    document = SpladeEncoder.from_pretrained(model, max_length=128)
    document.to("cuda" if torch.cuda.is_available() else "cpu")
    counts = DocumentFrequency(document.vocab_size)
    for start in range(0, len(train), 64):
        counts.update(**document.tokenize([text for _, text in train[start : start + 64]]))
    # The weights start as the IDF; without nn.Parameter they stay the IDF.
    query = StaticQueryEncoder(document.tokenizer, torch.nn.Parameter(counts.idf()))
    query.to(document.device)

    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    learned = [{"params": document.parameters(), "lr": 2e-5}]
    learned += [{"params": query.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(learned)
    document.train()
    for queries, documents in data.batches(train, 16, steps):
        anchor = query(**query.tokenize(queries))
        loss = info_nce(anchor, document(**document.tokenize(documents)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    document.eval()

    # In the weights, because the folder of sentence-transformers has no place for a threshold.
    calibrate(document, [text for _, text in held_out], 64, method="shift")
    query.save_pretrained(folder, document=document)  # also SparseEncoder(folder)
    loaded = StaticQueryEncoder.from_pretrained(folder)
    vectors = loaded.encode_query(["parse a date", "copy a file"], output="tokens")
    print(vectors)
    return vectors


if __name__ == "__main__":
    main(*sys.argv[1:2])
