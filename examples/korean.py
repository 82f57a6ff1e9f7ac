"""Train a Korean SPLADE model on a multilingual vocabulary, and keep it to Korean tokens.

python examples/korean.py FacebookAI/xlm-roberta-base
"""

import sys

import data
import torch

from sparse_losses import (
    Curriculum,
    Diagnostics,
    InfoNCELoss,
    LanguagePenaltyLoss,
    Phase,
    SpladeBatch,
    SpladeEncoder,
    SpladeObjective,
    TrainingSchedule,
    calibrate,
    language_penalty,
    language_token_ids,
)
from sparse_losses.objective import terms

WEIGHT = 0.0005  # of the penalty on both sides
# Its share of that, up to a tenth of the training: 0 up to the fourth, 1/64 in the fifth, ...
SHARES = {4: 0.0, 5: 1 / 64, 6: 1 / 16, 7: 1 / 4, 10: 1.0}


def main(
    model: str = "FacebookAI/xlm-roberta-base", steps: int = 1000, folder: str = "my-retriever"
) -> list[float]:
    pairs = data.KOREAN  # yours: many more (query, document), and texts that are held out
    queries, documents = map(list, zip(*pairs, strict=True))
    encoder = SpladeEncoder.from_pretrained(model, max_length=128)
    encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    calibrate(encoder, documents, 256, method="shift")  # start sparse

    special = encoder.tokenizer.all_special_ids
    allowed = language_token_ids(encoder.tokenizer, ["Hangul", "Latin"])
    costs = LanguagePenaltyLoss(
        language_penalty(encoder.vocab_size, allowed, special_token_ids=special)
    )
    objective = SpladeObjective(
        {
            "info_nce": (1.0, terms.info_nce(InfoNCELoss(similarity="dot", temperature=1.0))),
            "query_penalty": (WEIGHT, terms.language_penalty("query", costs)),
            "document_penalty": (WEIGHT, terms.language_penalty("document", costs)),
        }
    ).to(encoder.device)
    both = ("query_penalty", "document_penalty")
    phases = [Phase(last, weights=dict.fromkeys(both, x * WEIGHT)) for last, x in SHARES.items()]
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    schedule = TrainingSchedule(objective, Curriculum(phases, steps_per_epoch=max(1, steps // 10)))
    schedule.attach(optimizer)

    foreign = [foreign_share(encoder, documents, allowed)]
    encoder.train()
    for anchors, positives in data.batches(pairs, 16, steps):
        batch = SpladeBatch.from_columns(encoder, {"anchor": anchors, "positive": positives})
        total, _ = objective(batch)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    encoder.eval()
    foreign.append(foreign_share(encoder, documents, allowed))
    print(f"share of other scripts: {foreign[0]:.1%} -> {foreign[1]:.1%}")
    calibrate(encoder, documents, 64, queries=queries, query_target=32)
    encoder.save_pretrained(folder)
    return foreign


def foreign_share(encoder: SpladeEncoder, texts: list[str], allowed: torch.Tensor) -> float:
    special = encoder.tokenizer.all_special_ids
    seen = Diagnostics(encoder.vocab_size, special_token_ids=special, allowed_token_ids=allowed)
    seen.update(encoder.encode_document(texts, output="dense"))
    return seen.report()["foreign_share"]


if __name__ == "__main__":
    main(*sys.argv[1:2])
