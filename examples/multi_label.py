"""Train an encoder of texts with several labels by NWS, and find texts with the same labels.

python examples/multi_label.py google-bert/bert-base-uncased
"""

import sys

import data
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from sparse_losses import NWSLoss, label_similarity


class Encoder(torch.nn.Module):
    """The mean of a model's hidden states."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def forward(self, texts: list[str]) -> torch.Tensor:
        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=64, return_tensors="pt"
        ).to(self.model.device)
        mask = batch["attention_mask"][..., None]
        states = self.model(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        return (states * mask).sum(1) / mask.sum(1)


@torch.no_grad()
def shared(encoder: Encoder, texts: list[str], labels: torch.Tensor) -> float:
    """The share of a text's labels that its nearest neighbour has, too."""
    vectors = normalize(encoder.eval()(texts))
    nearest = (vectors @ vectors.T).fill_diagonal_(-2.0).argmax(1).cpu()
    return ((labels * labels[nearest]).sum(1) / labels.sum(1)).mean().item()


def main(model: str = "google-bert/bert-base-uncased", steps: int = 100) -> list[float]:
    rows = [(text, labels) for _, text, labels in data.documented()]  # yours: text, its labels
    names = sorted({name for _, labels in rows for name in labels})  # save them with the model
    multi_hot = torch.tensor([[name in labels for name in names] for _, labels in rows]).float()
    held_out, train = range(0, len(rows), 5), [n for n in range(len(rows)) if n % 5]
    asked = [rows[n][0] for n in held_out], multi_hot[list(held_out)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = Encoder(model).to(device)
    width = encoder.model.config.hidden_size
    prototypes = torch.nn.Parameter(torch.randn(len(names), width, device=device))  # one a label
    nws = NWSLoss(label_similarity(multi_hot[train]), temperature=0.1).to(device)
    groups = [{"params": [*encoder.parameters()]}, {"params": [prototypes], "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)

    before = shared(encoder, *asked)
    encoder.train()
    for numbers, texts in data.batches([(n, rows[n][0]) for n in train], 32, steps):
        labels = multi_hot[numbers].to(device)
        with torch.no_grad():
            key = encoder(texts)  # the same texts with other dropout: a second view
        loss = nws(encoder(texts), labels, prototypes, key=key, key_labels=labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = shared(encoder, *asked)
    print(f"labels that the nearest neighbour shares: {before:.1%} -> {after:.1%}")
    return [before, after]


if __name__ == "__main__":
    main(*sys.argv[1:2])
