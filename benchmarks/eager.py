"""The formulas as papers and notes write them down: the baseline of every ratio.

They take the tensors and options of the package's functions and nothing else: no chunks, no
guards, no kernels. Each is what a reader of the formula would type.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = [
    "distillation",
    "end_to_end",
    "flops",
    "idf_flops",
    "info_nce",
    "language_penalty",
    "margin_mse",
    "min_activation",
    "n_pair",
    "nws",
    "objective",
    "pairwise_contrastive",
    "positive_activation",
    "regularisers",
    "self_reconstruction",
    "splade_head",
    "splade_pool",
    "triplet_margin",
]


def info_nce(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor | None = None,
    *,
    temperature: float = 0.07,
    similarity: str = "cosine",
) -> Tensor:
    """Normalise, multiply, divide by the temperature, cross-entropy with the diagonal."""
    candidates = positive if negative is None else torch.cat([positive, negative])
    if similarity == "cosine":
        anchor, candidates = nnf.normalize(anchor, dim=-1), nnf.normalize(candidates, dim=-1)
    scores = anchor @ candidates.T / temperature
    return nnf.cross_entropy(scores, torch.arange(anchor.shape[0], device=anchor.device))


def n_pair(anchor: Tensor, positive: Tensor) -> Tensor:
    """``log(1 + sum(exp(a n - a p)))`` over the other rows' positives."""
    return nnf.cross_entropy(
        anchor @ positive.T, torch.arange(anchor.shape[0], device=anchor.device)
    )


def pairwise_contrastive(x1: Tensor, x2: Tensor, same: Tensor, *, margin: float = 1.0) -> Tensor:
    """Squared distance of one class, squared hinge of two."""
    distance = (x1 - x2).norm(dim=-1)
    return (same * distance**2 + (1 - same) * nnf.relu(margin - distance) ** 2).mean()


def triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, *, margin: float = 0.3
) -> Tensor:
    """Hinge of the two cosines."""
    near = nnf.cosine_similarity(anchor, positive)
    far = nnf.cosine_similarity(anchor, negative)
    return nnf.relu(margin - near + far).mean()


def _multi_hot(x: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(1, input_ids, attention_mask.to(x.dtype), "amax")


def self_reconstruction(activations: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Binary cross-entropy with a multi-hot target."""
    target = _multi_hot(activations, input_ids, attention_mask)
    return nnf.binary_cross_entropy_with_logits(activations, target)


def positive_activation(
    activations: Tensor, positive_input_ids: Tensor, positive_attention_mask: Tensor
) -> Tensor:
    """Minus the mean activation under a multi-hot mask."""
    target = _multi_hot(activations, positive_input_ids, positive_attention_mask)
    return -((target * activations).sum(-1) / target.sum(-1)).mean()


def flops(activations: Tensor) -> Tensor:
    """Sum over the vocabulary of the squared mean activation."""
    return activations.abs().mean(0).square().sum()


def idf_flops(activations: Tensor, token_penalty: Tensor, *, beta: float = 0.3) -> Tensor:
    """Weighted L1 plus weighted squares of the mean activations."""
    mean = activations.mean(0)
    return (token_penalty * mean.abs()).sum() + beta * (token_penalty * mean.square()).sum()


def min_activation(activations: Tensor, *, top_k: int = 5, threshold: float = 0.5) -> Tensor:
    """Hinge of the mean of the largest activations."""
    return nnf.relu(threshold - activations.topk(top_k, dim=-1).values.mean(-1)).mean()


def language_penalty(activations: Tensor, token_penalty: Tensor) -> Tensor:
    """Activations times what they cost."""
    return (activations * token_penalty).sum(-1).mean()


def regularisers(
    activations: Tensor, token_penalty: Tensor, input_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """What is asked of one side's vectors, one after the other."""
    return (
        idf_flops(activations, token_penalty)
        + min_activation(activations, threshold=10.0)
        + self_reconstruction(activations, input_ids, attention_mask)
        + language_penalty(activations, token_penalty)
    )


def distillation(
    student_scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float = 3.0,
    alpha_kl: float = 0.7,
    alpha_mse: float = 0.3,
) -> Tensor:
    """Softened KL plus the squared difference of z-scores; a part of weight 0 is not computed."""
    loss = student_scores.new_zeros(())
    if alpha_kl:
        kl = nnf.kl_div(
            nnf.log_softmax(student_scores / temperature, dim=-1),
            nnf.softmax(teacher_scores / temperature, dim=-1),
            reduction="batchmean",
        )
        loss = loss + alpha_kl * temperature**2 * kl
    if alpha_mse:
        student, teacher = (
            (scores - scores.mean()) / (scores.std() + 1e-8)
            for scores in (student_scores, teacher_scores)
        )
        loss = loss + alpha_mse * nnf.mse_loss(student, teacher)
    return loss


def margin_mse(
    student_positive: Tensor,
    student_negative: Tensor,
    teacher_positive: Tensor,
    teacher_negative: Tensor,
) -> Tensor:
    """Mean squared error of the margins."""
    return nnf.mse_loss(student_positive - student_negative, teacher_positive - teacher_negative)


def nws(
    query: Tensor,
    query_labels: Tensor,
    prototype: Tensor,
    label_similarity: Tensor,
    *,
    key: Tensor,
    key_labels: Tensor,
    queue: Tensor,
    queue_labels: Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float = 0.07,
    eps: float = 1e-8,
) -> Tensor:
    """The broadcast form: every sum over labels is taken of a ``[B, R, L]`` tensor."""
    labels = query_labels
    instances, instance_labels = torch.cat([key, queue]), torch.cat([key_labels, queue_labels])
    count = labels.sum(-1, keepdim=True)
    both = labels[:, None] * instance_labels[None]
    union = torch.maximum(labels[:, None], instance_labels[None]).sum(-1)
    overlap = alpha / union.clamp(min=1)
    share = (overlap[:, :, None] * instance_labels[None]).sum(1) + 1 - alpha / count
    share = labels * share
    per_label = labels / (torch.where(share <= 1e-6, 1.0, share) + eps)
    weight = overlap * (both * per_label[:, None]).sum(-1)
    similarity = ((labels @ label_similarity)[:, None] * instance_labels[None]).sum(-1)
    similarity = similarity / (count * instance_labels.sum(-1) + eps)

    weight = torch.cat([weight, per_label], dim=1)
    is_negative = torch.cat([both.sum(-1) == 0, labels == 0], dim=1)
    unlike = torch.cat([beta * (1 - similarity).clamp(0, 1), torch.ones_like(labels)], dim=1)
    references = nnf.normalize(torch.cat([instances, prototype]), dim=-1)
    scores = nnf.normalize(query, dim=-1) @ references.T / temperature
    highest = scores.amax(-1, keepdim=True)
    total = (is_negative * unlike * (scores - highest).exp()).sum(-1, keepdim=True)
    log_denominator = highest + (total + eps).log()
    return ((weight * (log_denominator - scores)).sum(-1) / (count[:, 0] + eps)).mean()


def splade_pool(logits: Tensor, attention_mask: Tensor) -> Tensor:
    """The SPLADE v2 maximum of ``log(1 + relu(logits))``, masked by a product."""
    activated = torch.log1p(torch.relu(logits)) * attention_mask[:, :, None].to(logits.dtype)
    return activated.max(1).values


def splade_head(hidden: Tensor, weight: Tensor, bias: Tensor, attention_mask: Tensor) -> Tensor:
    """The projection to the vocabulary, then the pooling."""
    return splade_pool(hidden @ weight.T + bias, attention_mask)


def end_to_end(
    query_hidden: Tensor,
    document_hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    query_mask: Tensor,
    document_mask: Tensor,
    *,
    temperature: float = 1.0,
    flops_weight: float = 1e-3,
) -> Tensor:
    """Two heads, dot-product InfoNCE with hard negatives, FLOPS on both sides."""
    queries = splade_head(query_hidden, weight, bias, query_mask)
    documents = splade_head(document_hidden, weight, bias, document_mask)
    positive, negative = documents[: len(queries)], documents[len(queries) :]
    contrast = info_nce(queries, positive, negative, temperature=temperature, similarity="dot")
    return contrast + flops_weight * (flops(queries) + flops(documents))


def objective(
    query: Tensor,
    document: Tensor,
    query_ids: Tensor,
    query_mask: Tensor,
    document_ids: Tensor,
    document_mask: Tensor,
    token_penalty: Tensor,
    teacher_scores: Tensor,
) -> Tensor:
    """The losses of V26 and a regulariser of the documents, one after the other."""
    unit = nnf.normalize(query, dim=-1), nnf.normalize(document, dim=-1)
    return (
        3.0 * info_nce(query, document)
        + 2.0 * distillation(unit[0] @ unit[1].T, teacher_scores)
        + 0.5 * self_reconstruction(query, query_ids, query_mask)
        + 2.0 * positive_activation(query, document_ids, document_mask)
        + min_activation(query)
        + 0.01 * (idf_flops(query, token_penalty) + idf_flops(document, token_penalty))
    )
