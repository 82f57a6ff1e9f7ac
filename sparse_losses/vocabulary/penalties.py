"""Penalties per token: by document frequency, or for tokens of unwanted languages."""

from typing import Literal

import torch
from torch import Tensor

from sparse_losses._core.checks import check_choice, check_integer, check_number, check_shapes
from sparse_losses._core.precision import compute_dtype
from sparse_losses._core.token_ids import TokenIds, id_mask


def idf_penalty(
    idf: Tensor,
    *,
    alpha: float = 4.0,
    special_token_ids: TokenIds = (),
    special_penalty: float = 100.0,
    stopword_ids: TokenIds = (),
    stopword_penalty: float = 15.0,
    minimum: float = 0.0,
    shape: Literal["exponential", "linear"] = "exponential",
) -> Tensor:
    r"""Token penalties that decrease with the inverse document frequency, for the IDF-FLOPS loss.

    $$w_j = \exp(-\alpha\, \widehat{\mathrm{idf}}_j) \quad\text{or}\quad
    w_j = 1 - \widehat{\mathrm{idf}}_j, \qquad \widehat{\mathrm{idf}}_j =
    \frac{\mathrm{idf}_j - \mathrm{idf}_{\min}}{\mathrm{idf}_{\max} - \mathrm{idf}_{\min}}$$

    with the minimum and the maximum over the tokens that are not special; $w_j = 1$ if the idf is
    constant. The penalty is $w_j$, raised to at least ``minimum``, then *multiplied* by
    ``stopword_penalty`` for stopwords, and *set* to ``special_penalty`` for special tokens.

    Args:
        idf: Inverse document frequency, finite floating point ``[V]``.
        alpha: Steepness of the exponential shape, >= 0; 0 makes all tokens equal.
        special_token_ids: Ids in ``[0, V)``: integers or an integer tensor, duplicates allowed.
        special_penalty: Penalty of the special tokens, >= 0.
        stopword_ids: Ids in ``[0, V)``, in the same form.
        stopword_penalty: Factor on the penalty of stopwords, >= 0.
        minimum: Smallest penalty before that factor, in [0, 1].
        shape: ``"exponential"`` or ``"linear"``.

    Returns:
        Penalties ``[V]`` on the device of ``idf``, float64 for float64 and float32 otherwise.

    Raises:
        ValueError: for a wrong shape or number, an idf that is not finite, or an id outside.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses import idf_penalty
        >>> idf = torch.tensor([9.0, 1.0, 2.0, 3.0])
        >>> idf_penalty(idf, special_token_ids=[0], stopword_ids=[1])
        tensor([1.0000e+02, 1.5000e+01, 1.3534e-01, 1.8316e-02])

    References:
        From the notes of a Korean neural sparse retriever (its versions V25 and V26).
    """
    vocab_size = check_shapes(idf=(idf, "V"))["V"]
    numbers = {"alpha": alpha, "special_penalty": special_penalty, "minimum": minimum}
    for name, number in {**numbers, "stopword_penalty": stopword_penalty}.items():
        check_number(name, number, minimum=0.0)
    if minimum > 1:
        raise ValueError(f"expected `minimum` in [0, 1], got {minimum!r}")
    check_choice("shape", shape, ("exponential", "linear"))
    idf = idf.detach().to(compute_dtype(idf=idf))
    if not idf.isfinite().all():
        raise ValueError("expected `idf` to be finite, got NaN or infinity")
    special = _mask("special_token_ids", special_token_ids, vocab_size, idf.device)
    stopword = _mask("stopword_ids", stopword_ids, vocab_size, idf.device)

    weight = torch.ones_like(idf)
    ordinary = idf[~special]
    if len(ordinary) and ordinary.min() < ordinary.max():
        low, high = ordinary.aminmax()
        normalised = (idf - low) / (high - low)
        weight = torch.exp(-alpha * normalised) if shape == "exponential" else 1 - normalised
    weight = weight.clamp(min=minimum)
    weight = torch.where(stopword, weight * stopword_penalty, weight)
    return torch.where(special, special_penalty, weight)


def language_penalty(
    vocab_size: int,
    allowed_ids: TokenIds,
    *,
    special_token_ids: TokenIds = (),
    penalty: float = 100.0,
) -> Tensor:
    r"""Token penalties that are 0 for allowed tokens, for the language penalty loss.

    $$p_j = \begin{cases} 0 & j \text{ allowed or special} \\ p & \text{otherwise} \end{cases}$$

    Args:
        vocab_size: Number of token ids, V, of the *model*, which may exceed the tokenizer's.
        allowed_ids: Ids in ``[0, V)``, as of ``language_token_ids``; integers or a tensor.
        special_token_ids: Ids in ``[0, V)`` that also get 0, as ``idf_penalty`` sets their cost.
        penalty: Penalty $p$ of all other tokens, >= 0.

    Returns:
        Penalties, float32 ``[V]`` on the CPU.

    Raises:
        ValueError: for an id outside ``[0, V)`` or a wrong penalty.
        TypeError: for ids that are not integers.

    Examples:
        >>> from sparse_losses import language_penalty
        >>> language_penalty(5, allowed_ids=[1, 3], special_token_ids=[0])
        tensor([  0.,   0., 100.,   0., 100.])
    """
    check_integer("vocab_size", vocab_size, minimum=1)
    check_number("penalty", penalty, minimum=0.0)
    cpu = torch.device("cpu")
    spared = _mask("allowed_ids", allowed_ids, vocab_size, cpu)
    spared |= _mask("special_token_ids", special_token_ids, vocab_size, cpu)
    return torch.where(spared, 0.0, float(penalty))


def _mask(name: str, ids: TokenIds, vocab_size: int, device: torch.device) -> Tensor:
    """Return the set of ids as a mask ``[V]``; the range is checked on any device."""
    mask = id_mask(name, ids.cpu() if isinstance(ids, Tensor) else ids, vocab_size, device)
    return torch.zeros(vocab_size, dtype=torch.bool, device=device) if mask is None else mask
