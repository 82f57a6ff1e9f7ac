"""``python -m benchmarks.studies.collection``: test collections in the format of BEIR.

One training on the documents of all collections, never on the queries, which then rank the
documents of their collection: from scratch, or from a pretrained model (``--model``). A masked
language model starts as it is; of any other encoder the word embeddings become the head, and the
bias is shifted so that a text starts with 256 dimensions. The vocabulary is cut to the tokens of
the collections.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparse_losses as sl
from benchmarks.run.table import read
from benchmarks.studies.beir import UNSEEN, Collection, load, ranked
from benchmarks.studies.learn import Results, Settings, figures_at, table, train

LENGTHS = (32, 96)  # tokens of a query and of a document
SUBWORDS = 3_000  # of the model from scratch
POINTS = [(number / 2, number) for number in (128, 64, 32, 16)]
START = 256  # dimensions of a text at the start of a pretrained model without a head
SPARSE = 1 / 4  # of the vocabulary, from scratch, as in the battery
EARLY = {"late": (0.1, 0.5)}
ARMS: dict[str, dict[str, Any]] = {
    "prune": {},
    "gain32": {"acts": "gain", "target": 32, "query_target": 16},
    "gain16": {"acts": "gain", "target": 16, "query_target": 8},
    "topk32": {"acts": "topk", "target": 32, "query_target": 16},
    "topk16": {"acts": "topk", "target": 16, "query_target": 8},
    "early32": {"acts": "topk", "target": 32, "query_target": 16, **EARLY},
    "early16": {"acts": "topk", "target": 16, "query_target": 8, **EARLY},
    "fixed": {"acts": "fixed"},
    "flops": {"acts": "fixed", "weight": 1000.0},
}


class Tower(nn.Module):
    """An encoder of ids whose head has a vocabulary of ``kept`` tokens."""

    def __init__(self, model: Any, kept: Tensor) -> None:
        super().__init__()
        words = model.get_input_embeddings()
        with torch.no_grad():
            smaller = nn.Embedding(len(kept), words.embedding_dim, padding_idx=0)
            smaller.weight = nn.Parameter(words.weight[kept].clone())
        out: Any = getattr(model, "get_output_embeddings", lambda: None)()
        has_bias = out is not None and out.bias is not None
        self.bias = nn.Parameter(out.bias.detach()[kept] if has_bias else torch.zeros(len(kept)))
        transform = model.cls.predictions.transform if out is not None else None
        self.model: Any = model.base_model
        self.model.set_input_embeddings(smaller)
        self.model.pooler = None
        self.head = sl.SpladeHead(smaller.weight, self.bias, transform=transform)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors."""
        return self.head(self.model(ids, mask)[0], mask)  # type: ignore[no-any-return]


def read_model(name: str, texts: Sequence[str]) -> tuple[Any, Callable[[], Any], bool]:
    """Return the tokenizer, what makes the model, and whether its head is trained."""
    import transformers as tr
    from tokenizers import BertWordPieceTokenizer

    if not name:
        words = BertWordPieceTokenizer()
        words.train_from_iterator(texts, SUBWORDS, show_progress=False)
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = tr.BertConfig(vocab_size=words.get_vocab_size(), intermediate_size=512, **sizes)
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        tokenizer = tr.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **special)
        return tokenizer, lambda: tr.BertForMaskedLM(config), False
    try:
        tokenizer, config = (
            kind.from_pretrained(name) for kind in (tr.AutoTokenizer, tr.AutoConfig)
        )
        is_trained = "MaskedLM" in " ".join(config.architectures or [])
        make = (tr.AutoModelForMaskedLM if is_trained else tr.AutoModel).from_pretrained
        make(name)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: cannot load the --model {name}: {error}") from error
    return tokenizer, lambda: make(name), is_trained


class Task:
    """The texts of all collections as ids of one model's tokens."""

    def __init__(self, collections: Sequence[Collection], name: str) -> None:
        self.collections, self.is_pretrained = collections, bool(name)
        texts = [text for one in collections for text in one.documents]
        tokenizer, self.make, self.is_trained = read_model(name, texts)
        lengths = (*LENGTHS, *LENGTHS[:1] * len(collections), *LENGTHS[1:] * len(collections))
        columns = [[pair[side] for one in collections for pair in one.pairs] for side in (0, 1)]
        columns += [one.queries for one in collections] + [one.documents for one in collections]
        cut: dict[str, Any] = {"truncation": True}
        both = zip(columns, lengths, strict=True)
        rows = [tokenizer(column, max_length=n, **cut)["input_ids"] for column, n in both]
        used = {token for column in rows for row in column for token in row}
        pad = tokenizer.pad_token_id
        self.kept = torch.tensor([pad, *sorted(used - {pad})])
        place = {token: number for number, token in enumerate(self.kept.tolist())}
        ids = [[torch.tensor([place[token] for token in row]) for row in one] for one in rows]
        self.pairs = list(zip(*ids[:2], strict=True))
        sides = ids[2 : 2 + len(collections)], ids[2 + len(collections) :]
        self.tests = list(zip(collections, *sides, strict=True))

    def settings(self, arm: Mapping[str, Any], **own: Any) -> Settings:
        """Return a training's settings: a learning rate that falls, dot products unless named."""
        common: dict[str, Any] = {"lr": 1e-3, "batch": 24}
        if self.is_pretrained:
            common = {"lr": 5e-5 if self.is_trained else 1e-4, "warmup": 0.1, "batch": 16}
        temperature = 0.05 if own.get("similarity") == "cosine" else 1.0
        common |= {"decay": True, "similarity": "dot", "temperature": temperature}
        return Settings(**{**common, **own, **arm})

    def run(self, settings: Settings) -> Iterator[dict[str, Any]]:
        """Train once; yield the figures for each collection."""
        torch.manual_seed(settings.seed)
        tower = Tower(self.make(), self.kept)
        about, encode = train({"query": tower, "document": tower}, self.pairs, settings)
        about["vocabulary"] = len(self.kept)
        for one, *sides in self.tests:
            q, d = encode("query", sides[0]), encode("document", sides[1])

            def rank(q: Tensor, d: Tensor, one: Collection = one) -> dict[str, float]:
                if settings.similarity == "cosine":
                    q, d = nn.functional.normalize(q), nn.functional.normalize(d)
                return {k: float(np.mean(v)) for k, v in ranked(q @ d.T, one.relevant).items()}

            for figures in figures_at(q, d, POINTS, rank, every=UNSEEN):
                yield {"collection": one.name, "source": one.source} | about | figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing in the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.collection")
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="folders in BEIR's format")
    add("--split", default="test", help="the judgements: qrels/SPLIT.tsv")
    add("--model", default="", help="a folder or name; default: a small model from scratch")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    add("--start", type=float, nargs="+", help="dimensions or share that a text starts with")
    add("--similarity", choices=("dot", "cosine"), default="dot")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=300)
    add("--output", type=Path, default=Path("collection.csv"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = Task([load(folder, args.split) for folder in args.data], args.model)
    default = 0.0 if task.is_trained else START if task.is_pretrained else SPARSE
    results = Results(args.output, "collection", ("model", "arm", "similarity", "steps", "seed"))
    for seed, arm in itertools.product(args.seeds, args.arms):
        for start in args.start or [default]:
            own = {"similarity": args.similarity, "steps": args.steps, "seed": seed}
            settings = task.settings(ARMS[arm], start=start, **own)
            name = Path(args.model).parent.name if args.model else "scratch"
            if results.missing(model=name, arm=settings.arm, **own):
                results.add([{"model": name, **row} for row in task.run(settings)])
    print(table(read(results.path), ["model", "similarity", "steps"], "ndcg_10"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
