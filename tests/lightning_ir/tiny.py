"""A tiny SPLADE of lightning-ir, what it is trained on, and the same in plain torch."""

from pathlib import Path

import torch
from lightning_ir import BiEncoderModule, LightningIRTrainer, TrainBatch
from lightning_ir.models import SpladeConfig
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
V = len(WORDS)
LENGTHS = {"query_length": 8, "doc_length": 8}


def save_backbone(folder: Path) -> Path:
    """A masked language model without dropout and its tokenizer, untrained."""
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    configuration = BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    BertForMaskedLM(configuration).save_pretrained(folder)
    return folder


def module(folder: Path, loss_functions, lr: float = 0.02, **config) -> BiEncoderModule:
    """Their module around their SPLADE, with plain gradient descent."""
    settings = {**LENGTHS, **config}
    made = BiEncoderModule(str(folder), SpladeConfig(**settings), loss_functions=loss_functions)
    return made.set_optimizer(torch.optim.SGD, lr=lr)


def batches(count: int, queries: int = 4, documents: int = 3, seed: int = 0) -> list[TrainBatch]:
    """Queries with their documents and a teacher's scores of them; the positive is not the first.

    The positive repeats its query's word, and the teacher knows it.
    """
    random = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        words = torch.randint(5, V, (queries, documents + 1), generator=random).tolist()
        texts = [[f"{WORDS[w]} {WORDS[w]}" for w in row[1:]] for row in words]
        targets = torch.rand(queries, documents, generator=random)
        for row, (own, targets_of_row) in enumerate(zip(words, targets, strict=True)):
            right = (row + 1) % documents
            texts[row][right] = f"{WORDS[own[0]]} {WORDS[own[1]]} {WORDS[own[0]]}"
            targets_of_row[right] += 4.0
        made.append(TrainBatch([WORDS[row[0]] for row in words], texts, targets=targets))
    return made


def joined(two: list[TrainBatch]) -> TrainBatch:
    return TrainBatch(
        [q for b in two for q in b.queries],
        [d for b in two for d in b.docs],
        targets=torch.cat([b.targets.reshape(len(b.queries), -1) for b in two]),
    )


def copies(made: list[TrainBatch]) -> list[TrainBatch]:
    """Their module reshapes the targets of the batches it is given."""
    return [TrainBatch(b.queries, b.docs, b.queries, targets=b.targets.clone()) for b in made]


def trainer(folder: Path, steps: int, **options) -> LightningIRTrainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return LightningIRTrainer(
        accelerator="cpu", max_steps=steps, default_root_dir=folder, **{**quiet, **options}
    )


def loader(made: list[TrainBatch]):
    return torch.utils.data.DataLoader(copies(made), batch_size=None)


class Plain(torch.nn.Module):
    """The same SPLADE, of transformers and torch alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tokenizer = BertTokenizerFast.from_pretrained(folder)
        self.model = BertForMaskedLM.from_pretrained(folder)

    def encode(self, texts: list[str]) -> torch.Tensor:
        tokens = self.tokenizer(texts, padding=True, return_tensors="pt")
        logits = self.model(**tokens).logits
        activations = torch.log1p(torch.relu(logits))
        mask = tokens["attention_mask"].bool()
        return activations.masked_fill(~mask[..., None], -torch.inf).amax(1)

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[Q, V]`` and documents ``[Q, D, V]``."""
        documents = self.encode([text for texts in batch.docs for text in texts])
        return self.encode(list(batch.queries)), documents.unflatten(0, (len(batch.queries), -1))

    def weights(self) -> dict[str, torch.Tensor]:
        """By lightning-ir's names."""
        names = (("bert.", "model."), ("cls.", "model.projection."))
        named = {}
        for name, value in self.model.named_parameters():
            old, new = next(pair for pair in names if name.startswith(pair[0]))
            named[new + name.removeprefix(old)] = value.detach()
        return named
