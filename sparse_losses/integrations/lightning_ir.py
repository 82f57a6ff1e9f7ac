"""Our losses as loss functions of lightning-ir's ``BiEncoderModule``.

lightning-ir chooses the inputs of a loss function by its base class. There is one adapter for each
kind of input: vectors, scores, activations.
"""

import torch
from lightning_ir.bi_encoder import BiEncoderOutput
from lightning_ir.data import TrainBatch
from lightning_ir.loss.base import (
    PairwiseLossFunction,
    RegularizationLossFunction,
    ScoringLossFunction,
)
from torch import Tensor, nn

from sparse_losses import DistillationLoss, MarginMSELoss
from sparse_losses.objective.shared_scores import over_pairs

__all__ = ["Contrastive", "Distillation", "Regularization"]


# The type checker sees lightning-ir's classes as Any, and a subclass of Any is an error.
class Contrastive(ScoringLossFunction):  # type: ignore[misc]
    """A loss of queries, their positives and negatives: InfoNCE, N-pair, triplet margin.

    A query's positive is the document with the largest target (the first of several); its other
    documents are its negatives.

    Args:
        loss: ``InfoNCELoss``, ``NPairLoss``, ``TripletMarginLoss``, or any module that takes
            ``[Q, V]``, ``[Q, V]`` and negatives and returns one number. It uses its own similarity,
            not the model's ``similarity_function``.
        shared_negatives: whether negatives are candidates of every query (``[Q (D - 1), V]``)
            instead of their own query only (``[Q, D - 1, V]``); not for the triplet margin.

    Raises:
        ValueError: for a loss with parameters or ``reduction="none"``; when called, for a model
            with several vectors per text.

    Examples:
        >>> import torch
        >>> from lightning_ir import BiEncoderOutput, TrainBatch
        >>> from lightning_ir.bi_encoder import BiEncoderEmbedding
        >>> from sparse_losses import InfoNCELoss
        >>> from sparse_losses.integrations.lightning_ir import Contrastive
        >>> contrastive = Contrastive(InfoNCELoss(temperature=1.0, similarity="dot"))
        >>> queries, documents = torch.eye(3)[:2, None], torch.eye(3)[[0, 2, 1, 2], None]
        >>> output = BiEncoderOutput(
        ...     torch.tensor([[1.0, 0.0], [1.0, 0.0]]),  # scores
        ...     BiEncoderEmbedding(queries),
        ...     BiEncoderEmbedding(documents),
        ... )
        >>> batch = TrainBatch(["a", "b"], [["c", "d"], ["e", "f"]])
        >>> batch.targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> contrastive.compute_loss(output, batch)  # log(1 + 2 / e)
        tensor(0.5514)
    """

    def __init__(self, loss: nn.Module, *, shared_negatives: bool = False) -> None:
        super().__init__()
        self.loss = _checked(loss)
        self.shared_negatives = shared_negatives

    def compute_loss(self, output: BiEncoderOutput, batch: TrainBatch) -> Tensor:
        """Compute the loss of the vectors in ``output``, with the targets in ``batch``."""
        scores = self.process_scores(output)
        targets = self.process_targets(scores, batch)
        if targets.shape != scores.shape:  # a flat list would give one positive for all queries
            raise ValueError(
                f"expected targets of the scores' shape, [Q, D] = {list(scores.shape)}, got "
                f"{list(targets.shape)}"
            )
        queries = _vectors("query_embeddings", output)
        documents = _vectors("doc_embeddings", output)
        documents = documents.reshape(*scores.shape, documents.shape[-1])  # [Q, D, V]
        row = torch.arange(len(scores), device=documents.device)[:, None]
        right = targets.argmax(-1, keepdim=True)
        wrong = torch.arange(scores.shape[1] - 1, device=documents.device).expand(len(scores), -1)
        wrong = wrong + (wrong >= right)
        negatives = documents[row, wrong] if scores.shape[1] > 1 else None
        if self.shared_negatives and negatives is not None:
            negatives = negatives.flatten(0, 1)
        loss = self.loss.to(documents.device)
        value: Tensor = loss(queries, documents[row, right].squeeze(1), negatives)
        return value


class Distillation(PairwiseLossFunction):  # type: ignore[misc]  # as above
    """A loss of the model's scores and a teacher's scores, which are the targets.

    ``MarginMSELoss`` uses every pair of a query's documents with different teacher scores, as
    lightning-ir's ``SupervisedMarginMSE`` does; without such a pair the loss is 0.

    Args:
        loss: ``DistillationLoss`` or ``MarginMSELoss``.

    Raises:
        TypeError: for another loss.
        ValueError: for a loss with parameters or ``reduction="none"``.

    Examples:
        >>> import torch
        >>> from lightning_ir import LightningIROutput, TrainBatch
        >>> from sparse_losses import MarginMSELoss
        >>> from sparse_losses.integrations.lightning_ir import Distillation
        >>> batch = TrainBatch(["a"], [["b", "c"]], targets=torch.tensor([[9.0, 5.0]]))
        >>> scores = torch.tensor([[3.0, 1.0]])
        >>> Distillation(MarginMSELoss()).compute_loss(LightningIROutput(scores), batch)
        tensor(4.)
    """

    def __init__(self, loss: DistillationLoss | MarginMSELoss) -> None:
        super().__init__()
        if not isinstance(loss, (DistillationLoss, MarginMSELoss)):
            raise TypeError(
                f"expected a DistillationLoss or a MarginMSELoss, got {type(loss).__name__}"
            )
        self.loss = _checked(loss)

    def compute_loss(self, output: BiEncoderOutput, batch: TrainBatch) -> Tensor:
        """Compute the loss of the scores in ``output`` and the targets in ``batch``."""
        scores = self.process_scores(output)
        targets = self.process_targets(scores, batch)
        if not targets.is_floating_point():  # graded labels
            targets = targets.float()
        if isinstance(self.loss, DistillationLoss):
            divergence: Tensor = self.loss(scores, targets)
            return divergence
        return over_pairs(
            self.loss,
            targets[:, :, None] > targets[:, None],  # [Q, better, worse]
            [side.unsqueeze(which) for side in (scores, targets) for which in (2, 1)],
            is_mean=self.loss.reduction == "mean",
            gathers=bool(self.loss.gather),
        )


class Regularization(RegularizationLossFunction):  # type: ignore[misc]  # as above
    """A loss of activations, on the queries and on the documents, each with its weight.

    lightning-ir's schedulers reach the weights under names such as
    ``loss_functions.1.query_weight``. A side whose weight is 0 is not computed.

    Args:
        loss: ``FlopsLoss``, ``IdfFlopsLoss``, ``LanguagePenaltyLoss``, ``MinActivationLoss``, or
            any module that takes ``[N, V]`` and returns one number.
        query_weight: weight of the loss of the queries.
        doc_weight: weight of the loss of all documents, as rows of one matrix.

    Raises:
        ValueError: for a loss with parameters or ``reduction="none"``; when called, for a model
            with several vectors per text.

    Examples:
        >>> import torch
        >>> from lightning_ir import BiEncoderOutput
        >>> from lightning_ir.bi_encoder import BiEncoderEmbedding
        >>> from sparse_losses import FlopsLoss
        >>> from sparse_losses.integrations.lightning_ir import Regularization
        >>> regularization = Regularization(FlopsLoss(), query_weight=1.0, doc_weight=0.1)
        >>> queries, documents = torch.eye(2)[:, None], torch.ones(4, 1, 2)
        >>> output = BiEncoderOutput(
        ...     None, BiEncoderEmbedding(queries), BiEncoderEmbedding(documents)
        ... )
        >>> regularization.compute_loss(output)  # 2 * 0.5^2 + 0.1 * 2
        tensor(0.7000)
    """

    def __init__(
        self, loss: nn.Module, query_weight: float = 1e-4, doc_weight: float = 1e-4
    ) -> None:
        super().__init__(query_weight, doc_weight)
        self.loss = _checked(loss)

    def compute_loss(self, output: BiEncoderOutput) -> Tensor:
        """Compute the weighted sum of both sides."""
        queries = _vectors("query_embeddings", output)
        documents = _vectors("doc_embeddings", output)
        loss = self.loss.to(queries.device)
        total = torch.zeros((), device=queries.device)
        for weight, activations in ((self.query_weight, queries), (self.doc_weight, documents)):
            if weight != 0:
                total = total + weight * loss(activations)
        return total


def _checked(loss: nn.Module) -> nn.Module:
    """Return the loss if lightning-ir can train with it."""
    tensors = vars(loss).items()
    learned = [name for name, _ in loss.named_parameters()]
    learned += [name for name, x in tensors if isinstance(x, Tensor) and x.requires_grad]
    if learned:
        raise ValueError(
            f"expected a loss without parameters, got {type(loss).__name__} with "
            f"{', '.join(map(repr, learned))}: lightning-ir optimises and saves only the model's "
            "parameters; pass a number"
        )
    if getattr(loss, "reduction", "mean") == "none":
        raise ValueError("expected `loss` to reduce to one number, got reduction='none'")
    return loss


def _vectors(name: str, output: BiEncoderOutput) -> Tensor:
    """Return embeddings ``[N, 1, V]`` as ``[N, V]``."""
    embedding = getattr(output, name)
    if embedding is None:
        raise ValueError(f"expected `{name}` in the output, got None")
    vectors: Tensor = embedding.embeddings
    if vectors.ndim != 3 or vectors.shape[1] != 1:
        raise ValueError(
            f"expected one vector per text, `{name}` of shape [N, 1, V], got {list(vectors.shape)}"
        )
    return vectors.squeeze(1)
