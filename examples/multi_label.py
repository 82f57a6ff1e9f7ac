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


def main(
    model: str = "google-bert/bert-base-uncased", steps: int = 100
) -> tuple[list[float], list[str]]:
    rows = [(text, labels) for _, text, labels in data.documented()]  # yours: text, its labels
    names = sorted({name for _, labels in rows for name in labels})  # save them with the model
    multi_hot = torch.tensor([[name in labels for name in names] for _, labels in rows]).float()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = Encoder(model).to(device)
    size = encoder.model.config.hidden_size
    prototypes = torch.nn.Parameter(torch.randn(len(names), size, device=device))  # one a label
    nws = NWSLoss(label_similarity(multi_hot), temperature=0.1).to(device)
    optimizer = torch.optim.AdamW([*encoder.parameters(), prototypes], lr=5e-5)

    losses = []
    encoder.train()
    numbered = [(text, number) for number, (text, _) in enumerate(rows)]
    for texts, numbers in data.batches(numbered, 32, steps):
        labels = multi_hot[numbers].to(device)
        with torch.no_grad():
            key = encoder(texts)  # the same texts with other dropout: a second view
        loss = nws(encoder(texts), labels, prototypes, key=key, key_labels=labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    encoder.eval()
    with torch.no_grad():
        scores = normalize(encoder([rows[0][0]])) @ normalize(prototypes).T
    best = [names[i] for i in scores[0].topk(3).indices]
    print(f"{rows[0][0]!r}: {best}, in truth {rows[0][1]}")
    return losses, best


if __name__ == "__main__":
    main(*sys.argv[1:2])
