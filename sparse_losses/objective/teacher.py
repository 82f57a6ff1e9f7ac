"""Teachers for distillation that score the texts of a batch during training."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparse_losses._core.token_ids import TokenIds, id_mask
from sparse_losses.vocabulary.bm25 import bm25_scores, check_bm25
from sparse_losses.vocabulary.document_frequency import DocumentFrequency

# A bi-encoder, or a function of queries and documents, dicts with token ids and texts, that returns
# scores [Q, D].
Teacher = Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]


class BM25Teacher(nn.Module):
    """BM25 on the encoder's own tokens (``bm25_scores``), as a teacher without a model.

    Pass it as ``teacher`` to ``SpladeBatch.from_columns`` or ``SentenceTransformersLoss``. It is
    called with two mappings with ``input_ids`` and ``attention_mask``, of queries and documents,
    as ``bm25_scores`` is. The mean length of a document excludes the special tokens, each counted
    once per document.

    Args:
        document_frequency: counts of the corpus' documents, on the encoder's own tokens.
        special_token_ids: tokens without a score or a length: ``tokenizer.all_special_ids``.
        k1: as in ``bm25_scores``.
        b: as in ``bm25_scores``.

    Examples:
        >>> import torch
        >>> from sparse_losses import BM25Teacher, DocumentFrequency
        >>> ids = torch.tensor([[0, 1, 2], [0, 2, 2]])  # 0 is special
        >>> texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        >>> counts = DocumentFrequency(4)
        >>> counts.update(**texts)
        >>> BM25Teacher(counts, special_token_ids=[0])(texts, texts)
        tensor([[0.8755, 0.2507],
                [0.3646, 0.5014]])
    """

    idf: Tensor

    def __init__(
        self,
        document_frequency: DocumentFrequency,
        *,
        special_token_ids: TokenIds = (),
        k1: float = 1.2,
        b: float = 0.75,
    ) -> None:
        super().__init__()
        counts = document_frequency
        where = counts.vocab_size, torch.device("cpu")
        is_special = id_mask("special_token_ids", special_token_ids, *where)
        self.special_token_ids = [] if is_special is None else is_special.nonzero()[:, 0].tolist()
        special = int(counts.df[self.special_token_ids].sum())
        self.mean_length = counts.mean_length - special / counts.num_documents
        check_bm25(mean_length=self.mean_length, k1=k1, b=b)
        self.k1, self.b = k1, b
        self.register_buffer("idf", counts.idf().float(), persistent=False)

    def forward(self, query: Mapping[str, Any], document: Mapping[str, Any]) -> Tensor:
        """Return the scores of every query with every document."""
        ids, mask = "input_ids", "attention_mask"
        for name, texts in (("query", query), ("document", document)):
            if texts.get(ids) is None:  # `SpladeLoss` does not pass tokens on
                raise TypeError(f"expected `{name}` as a dict of the tensors {ids} and {mask}")
        tensors = query[ids], query[mask], document[ids], document[mask]
        options: Any = {"k1": self.k1, "b": self.b, "mean_length": self.mean_length}
        idf, ignored = self.idf.to(query[ids].device), self.special_token_ids
        return bm25_scores(*tensors, idf, ignore_token_ids=ignored, **options)


def score_batch(
    teacher: Teacher,
    anchor: Mapping[str, Any],
    positive: Mapping[str, Any],
    negative: Mapping[str, Any] | None = None,
    *,
    score_anchors: bool = False,
) -> dict[str, Any]:
    """Return the fields of a batch whose candidates, and anchors if asked, a teacher scores."""
    scores = _scores(teacher, anchor, positive)
    if negative is not None:
        ids = negative["input_ids"]
        flat = {name: x.flatten(0, -2) for name, x in negative.items() if isinstance(x, Tensor)}
        others = _scores(teacher, anchor, {**negative, **flat})
        if ids.ndim == 3:  # keep each anchor's own negatives
            others = others.reshape(len(others), *ids.shape[:2]).diagonal().T
        scores = torch.cat([scores, others], 1)
    fields: dict[str, Any] = {"teacher_scores": scores, "teacher_candidates": "batch"}
    if score_anchors:
        fields["teacher_anchor_scores"] = _scores(teacher, anchor, anchor)
    return fields


def _scores(teacher: Any, query: Mapping[str, Any], document: Mapping[str, Any]) -> Tensor:
    if not hasattr(teacher, "encode_query"):
        output = teacher(query, document)
    elif query.get("texts") is None or document.get("texts") is None:
        raise ValueError(
            "expected columns of texts for a bi-encoder as `teacher`, got token ids alone (in a "
            "trainer of sentence-transformers, `keep_texts(trainer)` hands on the texts)"
        )
    else:
        options = {"convert_to_tensor": True, "show_progress_bar": False}
        queries = teacher.encode_query(query["texts"], **options)
        documents = teacher.encode_document(document["texts"], **options)
        output = teacher.similarity(queries, documents).float().to(query["input_ids"].device)
    scores = torch.as_tensor(output).detach()
    expected = [len(query["input_ids"]), len(document["input_ids"])]
    if (shape := list(scores.shape)) != expected:
        raise ValueError(f"expected the teacher's scores as {expected}, got {shape}")
    return scores
