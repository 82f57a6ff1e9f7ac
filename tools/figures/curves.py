"""Curves of the losses and of the token penalties: values, and gradients by autograd."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from sparse_losses import DocumentFrequency, idf_penalty
from sparse_losses import functional as F

Result = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture of curves."""

    curves: Callable[..., Result]  # settings to {"x": [...], panel: {series: [...], ...}, ...}
    x: str  # the label of the horizontal axis
    panels: Mapping[str, str]  # keys and titles, side by side
    lines: Mapping[str, Mapping[str, Any]]  # labels and settings, one entry per line
    log_x: bool = False


def slopes(x: Any, losses: Mapping[str, Callable[[Tensor], Tensor]]) -> Result:
    """Return the curves of losses without reduction: each row's value, and its slope in ``x``."""
    curves: Result = {"x": x, "value": {}, "gradient": {}}
    for series, loss in losses.items():
        leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = loss(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        curves["value"][series] = value.detach().numpy()
        curves["gradient"][series] = gradient.numpy()
    return curves


ones = functools.partial(torch.ones, dtype=torch.float64)
zeros = functools.partial(torch.zeros, dtype=torch.float64)


def distillation(*, lead: float, temperature: float, candidates: int) -> Result:
    """Each part by the lead of the best candidate; the student's other scores are the teacher's.

    The teacher's best leads by `lead`, the others are evenly spaced below.
    """
    steps = torch.arange(candidates - 1, dtype=torch.float64) / (candidates - 1)
    teacher = torch.cat([ones(1), -steps])[None] * lead

    def loss(best: Tensor, alpha_kl: float) -> Tensor:
        options = {"temperature": temperature, "alpha_kl": alpha_kl, "alpha_mse": 1 - alpha_kl}
        students = [torch.cat([score[None, None], teacher[:, 1:]], dim=1) for score in best]
        return torch.stack([F.distillation_loss(row, teacher, **options) for row in students])

    x = [-1 + 4 * i / 121 for i in range(122)]  # the grid avoids 0 and 1
    losses = {"KL": lambda best: loss(best, 1.0), "z-scores": lambda best: loss(best, 0.0)}
    return slopes([share * lead for share in x], losses) | {"x": x}


def flops(*, share: float, vocabulary: int) -> Result:
    """The mean over batches of independent texts, by batch size, for `vocabulary` such tokens.

    A token has activation 1 in a share of the texts. The mean is exact: column k is a token that is
    active in k rows, weighted by the binomial probability of k.
    """

    def average(rows: int, estimator: str, first_is_active: bool) -> tuple[float, float]:
        others = rows - first_is_active
        k, n = torch.arange(others + 1, dtype=torch.float64), torch.tensor(others).double()
        choices = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        chance = (choices + k * np.log(share) + (n - k) * np.log1p(-share)).exp()
        active = torch.arange(rows)[:, None] < k + first_is_active
        x = active.double().requires_grad_()
        loss = F.flops_loss(x * chance.sqrt(), estimator=estimator)
        (gradient,) = torch.autograd.grad(loss, x)
        return loss.item(), gradient[0].sum().item()

    sizes = [round(2 ** (i / 2)) for i in range(4, 21)]  # 4 to 1,024
    curves: Result = {"x": sizes, "value": {}, "gradient": {}}
    for each in ("biased", "unbiased"):
        curves["value"][each] = [vocabulary * average(b, each, False)[0] for b in sizes]
        curves["gradient"][each] = [b * average(b, each, True)[1] for b in sizes]
    return curves


def idf_flops(*, alpha: float, beta: float) -> Result:
    """Three tokens with penalties of `idf_penalty` in one text (B = 1), and FLOPS."""
    tokens = {"most frequent token": 0.0, "in the middle": 0.5, "rarest": 1.0}  # idf, from 0 to 1
    penalty = idf_penalty(torch.tensor(list(tokens.values()), dtype=torch.float64), alpha=alpha)
    losses = {
        name: lambda x, w=w: vmap(lambda a: F.idf_flops_loss(a[None, None], w[None], beta=beta))(x)
        for name, w in zip(tokens, penalty, strict=True)
    }
    losses["FLOPS"] = vmap(lambda a: F.flops_loss(a[None, None]))
    return slopes(np.linspace(0.01, 2.01, 201), losses)


def info_nce(*, temperature: float, negatives: int) -> Result:
    """One row, all negatives at cosine 0; with dot products the gradient is the score's own."""
    anchor, negative = ones(201, 1), zeros(negatives, 1)
    options = {"temperature": temperature, "similarity": "dot", "in_batch": False}

    def loss(cosine: Tensor) -> Tensor:
        return F.info_nce_loss(anchor, cosine[:, None], negative, **options, reduction="none")

    return slopes(np.linspace(-1, 1, 201), {"": loss})


def language_penalty(*, cost: float, flops: float, texts: int) -> Result:
    """A token that is equally active in `texts` of 100; `cost` is the weight times the penalty."""
    rows, x = 100, np.linspace(0.025, 5.025, 201)
    penalty = torch.tensor([cost], dtype=torch.float64)

    def column(own: Tensor, other: Tensor) -> Tensor:
        own, other = torch.log1p(torch.stack([own, other]).relu())
        active = torch.cat([own[None], other.expand(texts - 1)])
        return torch.cat([active, active.new_zeros(rows - texts)])[:, None]

    losses = {
        "language penalty": lambda *z: F.language_penalty_loss(column(*z), penalty),
        "FLOPS": lambda *z: flops * F.flops_loss(column(*z)),
    }
    z = torch.tensor(x)
    value = {name: vmap(loss)(z, z).numpy() for name, loss in losses.items()}
    gradient = {name: rows * vmap(grad(loss))(z, z).numpy() for name, loss in losses.items()}
    return {"x": x, "value": value, "gradient": gradient}


def margin_mse(*, margin: float) -> Result:
    """One pair, both negatives score 0; InfoNCE with temperature 1 and dot products."""
    zero, one = zeros(161), ones(161, 1)
    losses = {
        "MarginMSE": lambda x: F.margin_mse_loss(x, zero, zero + margin, zero, reduction="none"),
        "InfoNCE": lambda x: F.n_pair_loss(one, x[:, None], zero[:, None, None], reduction="none"),
    }
    return slopes([-5 + i / 10 for i in range(161)], losses)


def min_activation(*, tokens: int, top_k: int, threshold: float) -> Result:
    """A text with a few equally active tokens, all others are 0; the grid avoids the kinks."""
    silent, counts = zeros(200, top_k), torch.full((200,), tokens)
    options = {"top_k": top_k, "threshold": threshold, "reduction": "none"}

    def loss(height: Tensor, counts: Tensor | None = None) -> Tensor:
        rows = torch.cat([height[:, None].expand(-1, tokens), silent], dim=1)
        return F.min_activation_loss(rows, counts, **options)

    losses = {"without token counts": loss, "with token counts": lambda x: loss(x, counts)}
    return slopes(0.00317 + np.arange(200) * 0.01, losses)


def nws(*, similarity: float, beta: float, temperature: float, prototypes: int) -> Result:
    """One row against the cosine of a key with another label; `similarity` is that of the labels.

    The cosine of the query and its own prototype is 0.5; other prototypes are at 0.
    """
    query, own, side, other = torch.eye(4, dtype=torch.float64)
    query.requires_grad_()
    prototype = other.repeat(prototypes + 1, 1)
    prototype[0] = 0.5 * query.detach() + np.sqrt(1 - 0.5**2) * own
    query_labels, key_labels = torch.eye(prototypes + 1, dtype=torch.int64)[:2, None]
    alike = torch.eye(prototypes + 1, dtype=torch.float64)
    alike[0, 1] = alike[1, 0] = similarity
    options = {"beta": beta, "temperature": temperature, "eps": 0.0, "key_labels": key_labels}

    def row(x: float) -> tuple[Tensor, Tensor]:
        # Only the key has a component along `side`, so the gradient along it is the key's alone.
        part = np.sqrt(1 - x**2)
        key = (x * query.detach() + part * side)[None]
        loss = F.nws_loss(query[None], query_labels, prototype, alike, key=key, **options)
        (gradient,) = torch.autograd.grad(loss, query)
        return loss.detach(), gradient[2] / part

    x = (np.arange(200) + 0.5) / 100 - 1
    value, gradient = zip(*map(row, x), strict=True)
    return {"x": x, "value": {"": np.array(value)}, "gradient": {"": np.array(gradient)}}


def pairwise_contrastive(*, margin: float) -> Result:
    """One pair against its distance; 0 is left out, as the gradient there is 0 by convention."""
    origin = zeros(150, 1)

    def loss(distance: Tensor, same: bool) -> Tensor:
        labels = torch.full((150,), same)
        options = {"margin": margin, "reduction": "none"}
        return F.pairwise_contrastive_loss(origin, distance[:, None], labels, **options)

    losses = {"same": lambda x: loss(x, True), "different": lambda x: loss(x, False)}
    return slopes((np.arange(150) + 0.5) / 50, losses)


def penalties(*, alpha: float, minimum: float) -> Result:
    """Penalties of ordinary tokens, neither special tokens nor stopwords."""
    df = np.unique(np.round(np.geomspace(1, 600_000, 121)).astype(np.int64))
    counts = DocumentFrequency(vocab_size=len(df) + 1)
    counts.num_documents = 1_000_000
    counts.df = torch.from_numpy(np.concatenate([[0], df]))  # the rarest token is in no document
    penalty = idf_penalty(counts.idf(), alpha=alpha, minimum=minimum)[1:].numpy()
    return {"x": df, "penalty": {"": penalty}, "log10": {"": np.log10(penalty)}}


def positive_activation(*, weight: float, tokens: int, others: float) -> Result:
    """One token of a positive; the other `tokens - 1` have weight 1 and activation `others`."""
    rest = others * ones(121, tokens - 1)
    ids = torch.arange(tokens).expand(121, -1)
    weights = torch.tensor([weight] + [1.0] * (tokens - 1), dtype=torch.float64)

    def loss(x: Tensor, saturating: bool = False) -> Tensor:
        texts = (torch.cat([x[:, None], rest], dim=1), ids, torch.ones_like(ids))
        options = {"saturating": saturating, "reduction": "none"}
        return F.positive_activation_loss(*texts, weights, **options)

    losses = {"plain": loss, "saturating": lambda x: loss(x, saturating=True)}
    return slopes([i / 20 for i in range(121)], losses)


def self_reconstruction(*, vocabulary: int, tokens: int, others: float) -> Result:
    """One text in both forms; other tokens score `others`; the pull is the negative gradient."""
    x = [-6 + i / 10 for i in range(121)]
    ids = torch.arange(tokens)[None]
    row = others * ones(1, vocabulary)
    result: Result = {"x": x, "value": {}, "pull": {}}
    for series, balanced in (("plain", False), ("balanced", True)):
        values, pulls = [], []
        for score in x:
            row[:, :tokens] = score
            leaf = row.clone().requires_grad_()
            loss = F.self_reconstruction_loss(leaf, ids, torch.ones_like(ids), balanced=balanced)
            (gradient,) = torch.autograd.grad(loss, leaf)
            values.append(loss.item())
            pulls.append(math.log10(-gradient[0, 0].item()))
        result["value"][series], result["pull"][series] = values, pulls
    return result


def triplet_margin(*, margin: float, hardest: float, spread: float) -> Result:
    """One row with six negatives from `hardest` down by `spread`, none on the grid."""
    anchor = ones(200, 1)
    negatives = torch.tensor(hardest - spread * np.arange(6) / 5)[None, :, None].expand(200, 6, 1)
    options = {"margin": margin, "similarity": "dot", "reduction": "none"}

    def loss(cosine: Tensor) -> Tensor:
        return F.triplet_margin_loss(anchor, cosine[:, None], negatives, **options)

    return slopes(((np.arange(200) + 0.5) - 100) / 100, {"": loss})


def panels(value: str, gradient: str) -> dict[str, str]:
    """Return the titles of a loss's two panels."""
    return {"value": value, "gradient": gradient}


COSINE = "cosine of anchor and positive"
FIGURES = {
    "distillation": Figure(
        distillation,
        "student's lead / teacher's lead",
        panels("each part of the loss", "gradient by the best candidate's score"),
        {
            "cosines, lead 0.5": {"lead": 0.5, "temperature": 3.0, "candidates": 8},
            "over 0.05, lead 10": {"lead": 10.0, "temperature": 3.0, "candidates": 8},
        },
    ),
    "flops": Figure(
        flops,
        "rows of the batch",
        panels("average loss", "average pull on an active entry, times B"),
        {
            "in 2% of texts": {"share": 0.02, "vocabulary": 30_522},
            "in 0.5%": {"share": 0.005, "vocabulary": 30_522},
        },
        log_x=True,
    ),
    "idf_flops": Figure(
        idf_flops,
        "mean activation of the token",
        panels("cost of the token", "pull, times B"),
        {"": {"alpha": 4.0, "beta": 0.3}},
    ),
    "info_nce": Figure(
        info_nce,
        COSINE,
        panels("loss, in nats", "gradient by that cosine"),
        {f"t = {t}": {"temperature": t, "negatives": 31} for t in (0.02, 0.07, 0.2, 1.0)},
    ),
    "language_penalty": Figure(
        language_penalty,
        "pooled logit of the token",
        panels("cost of the token", "pull on its logit in one text, times B"),
        {"": {"cost": 0.5, "flops": 0.5, "texts": 20}},
    ),
    "margin_mse": Figure(
        margin_mse,
        "the student's margin",
        panels("loss", "gradient by that margin"),
        {"": {"margin": 3.0}},
    ),
    "min_activation": Figure(
        min_activation,
        "activation of each of the text's tokens",
        panels("loss of the text", "gradient by that activation"),
        {"": {"tokens": 3, "top_k": 5, "threshold": 0.5}},
    ),
    "nws": Figure(
        nws,
        "cosine of query and key",
        panels("loss, in nats", "gradient by that cosine"),
        {
            f"S = {s}": {"similarity": s, "beta": 1.0, "temperature": 0.07, "prototypes": 31}
            for s in (0.0, 0.5, 0.9, 1.0)
        },
    ),
    "pairwise_contrastive": Figure(
        pairwise_contrastive,
        "Euclidean distance of the pair",
        panels("loss", "gradient by the distance"),
        {"m = 1": {"margin": 1.0}},
    ),
    "penalties": Figure(
        penalties,
        "documents with the token, of 1,000,000",
        {"penalty": "penalty", "log10": "log10 of the penalty"},
        {
            "α = 1": {"alpha": 1.0, "minimum": 0.0},
            "α = 2.5": {"alpha": 2.5, "minimum": 0.0},
            "α = 4": {"alpha": 4.0, "minimum": 0.0},
            "α = 4, minimum 0.1": {"alpha": 4.0, "minimum": 0.1},
        },
        log_x=True,
    ),
    "positive_activation": Figure(
        positive_activation,
        "activation of one token of the positive",
        panels("loss of the row", "gradient by that activation"),
        {f"weight {w}": {"weight": w, "tokens": 10, "others": 1.0} for w in (1.0, 0.1)},
    ),
    "self_reconstruction": Figure(
        self_reconstruction,
        "score of the text's own tokens",
        {"value": "loss, in nats", "pull": "log10 of the pull on one own token"},
        {f"V = {v:,}": {"vocabulary": v, "tokens": 30, "others": 0.0} for v in (8000, 250_000)},
    ),
    "triplet_margin": Figure(
        triplet_margin,
        COSINE,
        panels("loss", "gradient by that cosine"),
        {
            "m = 0.3": {"margin": 0.3, "hardest": 0.2, "spread": 0.0},
            "m = 0.6": {"margin": 0.6, "hardest": 0.2, "spread": 0.0},
            "m = 0.3, six negatives": {"margin": 0.3, "hardest": 0.2, "spread": 1.0},
        },
    ),
}
