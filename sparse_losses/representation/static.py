"""Queries without a model: one weight per token."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_choice, check_shapes
from sparse_losses._core.extras import from_extra
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.token_ids import as_mask, attended_ids
from sparse_losses.representation import encoding
from sparse_losses.representation.encoder import SpladeEncoder
from sparse_losses.representation.folder import ENCODER, Folder, named_damage, write_router

KIND = "SparseStaticEmbedding"  # the module of sentence-transformers
PLACE = f"query_0_{KIND}"  # its folder, as sentence-transformers names it
QUERY: dict[str, Any] = {"truncation": True, "add_special_tokens": False}  # how it tokenizes


class StaticQueryEncoder(nn.Module):
    r"""An encoder of queries that needs no model: each token has one weight.

    $$x_j = w_j \text{ if token } j \text{ occurs in the query, else } 0$$

    However often a token occurs, its weight counts once. Special tokens have the weight 0, whatever
    ``weight`` holds for them. Documents are encoded by a ``SpladeEncoder`` with the same tokens.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        weight: ``[V]`` floating. An ``nn.Parameter`` is trained, any other tensor is a
            buffer, such as ``DocumentFrequency.load(path).idf()``.

    Examples:
        >>> import torch
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from sparse_losses import StaticQueryEncoder
        >>> vocabulary = {"[UNK]": 0, "the": 1, "sparse": 2}
        >>> tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        >>> tokens.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="[UNK]")
        >>> encoder = StaticQueryEncoder(tokenizer, torch.tensor([1.0, 0.5, 2.0]))
        >>> encoder.encode_query(["the sparse sparse unknown"], output="tokens")
        [{'sparse': 2.0, 'the': 0.5}]

    References:
        Towards Competitive Search Relevance For Inference-Free Learned Sparse Retrievers.
    """

    weight: Tensor
    _special_ids: Tensor

    def __init__(self, tokenizer: Any, weight: Tensor) -> None:
        super().__init__()
        check_shapes(weight=(weight, "V"))
        compute_dtype(weight=weight)  # an error for integers
        least = max(tokenizer.get_vocab().values(), default=0) + 1
        if len(weight) < least:
            raise ValueError(f"expected `weight` of at least {least} tokens, got {len(weight)}")
        self.tokenizer, self.vocab_size, self.prompt = tokenizer, len(weight), ""
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight.detach())
        special = torch.tensor(tokenizer.all_special_ids, dtype=torch.int64, device=weight.device)
        self.register_buffer("_special_ids", special, persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vectors ``[B, V]``, fp32 (fp64 for a weight in fp64)."""
        check_shapes(input_ids=(input_ids, "B S"), attention_mask=(attention_mask, "B S, optional"))
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        attended = as_mask("attention_mask", attention_mask)
        ids = attended_ids("input_ids", input_ids, attended, self.vocab_size)
        # The positions that do not count go to an extra column.
        columns = torch.where(attended & ~torch.isin(ids, self._special_ids), ids, self.vocab_size)
        occurs = columns.new_zeros(len(ids), self.vocab_size + 1).bool()
        occurs = occurs.scatter(1, columns, True)[:, :-1]
        return torch.where(occurs, self.weight.to(compute_dtype(weight=self.weight)), 0.0)

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` ``[B, S]``, without special tokens.

        The prompt of a loaded folder is put before the texts.
        """
        return encoding.token_ids(self.tokenizer, texts, self.weight.device, self.prompt, **QUERY)

    def encode_query(
        self, texts: Sequence[str], *, output: Literal["csr", "dense", "tokens"] = "csr"
    ) -> Any:
        """Return the vectors of queries, as ``SpladeEncoder.encode``, negative weights included."""
        encoding.check_texts(texts)
        check_choice("output", output, ("csr", "dense", "tokens"))
        # Not by `forward`: its [B, V] costs more than all else.
        queries = [self.prompt + text for text in texts]
        found = self.tokenizer(queries, **QUERY)["input_ids"] if texts else []
        special, weight = set(self.tokenizer.all_special_ids), self.weight.detach().float().cpu()
        sets = [sorted(set(row) - special) for row in found]
        pairs = [(i, token) for i, row in enumerate(sets) for token in row]
        rows, ids = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).T
        kept = weight[ids] != 0
        entries = rows[kept], ids[kept], weight[ids][kept]
        shape = len(texts), self.vocab_size
        return encoding.collected([entries], shape, output, self.tokenizer)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], **options: Any
    ) -> "StaticQueryEncoder":
        """Load the query side of a folder that ``save_pretrained`` or sentence-transformers wrote.

        Options are those of the loaders of ``transformers``. A ``ValueError`` tells that queries
        are not encoded by a ``SparseStaticEmbedding`` alone.
        """
        with from_extra("transformers"):
            from transformers import AutoTokenizer

        folder = Folder(name_or_path, **options)
        modules = folder.modules("query")
        if list(modules) != [KIND]:
            got = ", ".join(modules) or "no modules"
            raise ValueError(f"expected {folder.name} to have a {KIND} for queries, got {got}")
        side = modules[KIND]
        with named_damage(folder.name):
            weight, said = side.tensors("model.safetensors")["weight"], folder.json(ENCODER)
            frozen = side.json("config.json").get("frozen", False)
            tokenizer = AutoTokenizer.from_pretrained(folder.name, **side.hub)
            encoder = cls(tokenizer, weight if frozen else nn.Parameter(weight))
            encoder.prompt = (said.get("prompts") or {}).get("query", "")
        return encoder

    def save_pretrained(self, folder: str | os.PathLike[str], *, document: SpladeEncoder) -> None:
        """Write a folder of sentence-transformers with both sides, a ``Router``.

        ``from_pretrained`` reads the queries' side, ``SpladeEncoder.from_pretrained`` that of
        ``document``, an encoder of the same tokens, whose prompts are saved for both. Files of
        other names stay. A ``ValueError`` names tokens or sizes that differ.
        """
        from safetensors.torch import save_file

        size = len(tokens := self.tokenizer.get_vocab())
        if document.tokenizer.get_vocab() != tokens:
            raise ValueError("expected `document` to have the tokens of the queries, got others")
        if {self.vocab_size, document.vocab_size} != {size}:
            got = f"{self.vocab_size} and {document.vocab_size}"
            raise ValueError(
                f"expected a weight and a `document` of V = {size}, the tokenizer's tokens, got "
                f"{got}: model.resize_token_embeddings({size})"
            )
        document.save_pretrained(folder)
        place = Path(folder) / PLACE
        self.tokenizer.save_pretrained(place)
        weight = self.weight.detach().index_fill(0, self._special_ids, 0.0)
        save_file({"weight": weight}, place / "model.safetensors")
        write_router(Path(folder), PLACE, frozen=not self.weight.requires_grad)
