"""Train a SPLADE model on the scores of a dense teacher and of BM25.

python examples/teachers.py prithivida/Splade_PP_en_v2 sentence-transformers/all-MiniLM-L6-v2
"""

import sys

import data
import torch
from sentence_transformers import SentenceTransformer

from sparse_losses import (
    BM25Teacher,
    DistillationLoss,
    DocumentFrequency,
    InfoNCELoss,
    SpladeEncoder,
)
from sparse_losses.functional import mix_teachers


def main(
    model: str = "prithivida/Splade_PP_en_v2",
    teacher: str = "sentence-transformers/all-MiniLM-L6-v2",
    steps: int = 100,
) -> float:
    train, held_out = data.pairs()  # yours: (query, document)
    encoder = SpladeEncoder.from_pretrained(model, max_length=128)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    dense = SentenceTransformer(teacher)  # it reads texts, with a tokenizer of its own

    counts = DocumentFrequency(encoder.vocab_size)
    for start in range(0, len(train), 64):
        counts.update(**encoder.tokenize([text for _, text in train[start : start + 64]]))
    bm25 = BM25Teacher(counts, special_token_ids=encoder.tokenizer.all_special_ids)

    info_nce = InfoNCELoss(similarity="dot", temperature=1.0)
    distillation = DistillationLoss(temperature=1.0, alpha_kl=1.0, alpha_mse=0.0)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    encoder.train()
    for queries, documents in data.batches(train, 16, steps):
        tokens = encoder.tokenize(queries), encoder.tokenize(documents)
        with torch.no_grad():
            sides = (
                dense.encode(texts, convert_to_tensor=True, normalize_embeddings=True)
                for texts in (queries, documents)
            )
            cosines = next(sides) @ next(sides).T  # [B, B]
            # The mixture has the mean and spread of its first teacher: here of logits.
            scores = mix_teachers([cosines / 0.05, bm25(*tokens)], weights=[2.0, 1.0])
        anchor, positive = (encoder(**side) for side in tokens)
        loss = info_nce(anchor, positive) + 0.5 * distillation(anchor @ positive.T, scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder.eval()
    print(f"Recall@10: {data.recall(encoder, held_out):.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:3])
