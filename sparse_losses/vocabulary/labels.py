"""Similarity of labels, computed from their co-occurrence."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_shapes
from sparse_losses._core.precision import widest_dtype


def label_similarity(labels: Tensor, *, method: Literal["npmi", "jaccard"] = "npmi") -> Tensor:
    r"""Similarity of labels by their co-occurrence, for the NWS loss.

    $$S_{ij} = \frac12 \left(\frac{\log \frac{p_{ij}}{p_i\, p_j}}{-\log p_{ij}} + 1\right)
    \;\text{(npmi)} \qquad S_{ij} = \frac{n_{ij}}{n_i + n_j - n_{ij}} \;\text{(jaccard)}$$

    where $n_i$ of the $N$ rows have label $i$, $n_{ij}$ have both labels, and $p = n / N$. Labels
    that never occur together have $0$, and with npmi those that occur only together $1$, also if
    all rows have both. The diagonal is $1$, also for a label that no row has.

    Args:
        labels: Multi-hot labels of the training set ``[N, L]``, bool, integer or float 0/1.
        method: ``"npmi"`` or ``"jaccard"``.

    Returns:
        Symmetric matrix ``[L, L]`` in [0, 1], computed in float64; float64 for float64 labels,
        float32 otherwise. With no rows it is the identity.

    Raises:
        ValueError: for a wrong shape or method, or labels that are not 0 or 1.

    Examples:
        >>> import torch
        >>> from sparse_losses import label_similarity
        >>> labels = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 1]])
        >>> label_similarity(labels)
        tensor([[1.0000, 0.7075, 0.0000],
                [0.7075, 1.0000, 0.0000],
                [0.0000, 0.0000, 1.0000]])

    References:
        Bouma, "Normalized (Pointwise) Mutual Information in Collocation Extraction", 2009.
    """
    check_shapes(labels=(labels, "N L"))
    check_choice("method", method, ("npmi", "jaccard"))
    if (other := (labels != 0) & (labels != 1)).any():
        raise ValueError(f"expected `labels` to be 0 or 1, got {labels[other][0].item()}")
    dtype = torch.float64 if labels.dtype == torch.float64 else torch.float32
    y = labels.detach().to(widest_dtype(labels.device))
    both = y.T @ y
    count = both.diagonal()
    if method == "jaccard":
        similarity = both / (count[:, None] + count - both).clamp(min=1)
    else:
        rows = len(labels)
        seen = torch.where(both > 0, both, 1.0)
        information = torch.log(seen * rows / (count[:, None] * count).clamp(min=1))
        # If all rows have both labels this is 0 / 0, with limit 1.
        everywhere = both == rows
        npmi = information / torch.where(everywhere, 1.0, torch.log(rows / seen))
        similarity = torch.where(everywhere, 1.0, (npmi + 1) / 2).clamp(0, 1)
        similarity = torch.where(both > 0, similarity, 0.0)
    return similarity.fill_diagonal_(1.0).to(dtype)
