"""Token ids and masks of texts, checked and reduced to sets."""

from collections.abc import Iterable
from numbers import Integral

import torch
import torch.nn.functional as nnf
from torch import Tensor

from sparse_losses._core.checks import check_zero_one, values_can_be_checked
from sparse_losses._core.private_torch import assert_on_device, transforms_are_active

TokenIds = Iterable[int] | Tensor


def as_mask(name: str, mask: Tensor) -> Tensor:
    """Convert a bool, integer or float 0/1 mask to bool."""
    if mask.dtype == torch.bool:
        return mask
    is_set = mask.bool()
    if values_can_be_checked(mask) and not torch.equal(mask, is_set):
        check_zero_one(name, mask)
    return is_set


def attended_ids(
    name: str, input_ids: Tensor, attended: Tensor, vocab_size: int, *, gathered: bool = False
) -> Tensor:
    """Return ``input_ids`` as int64, 0 where not attended; raise for ids outside ``[0, V)``.

    ``gathered``: the caller itself ignores what is not attended, and gathers ``V`` columns by the
    rest. An accelerator checks the range there, so in eager mode nothing is computed here.
    """
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(f"expected `{name}` to be integers, got {input_ids.dtype}")
    ids, is_free = input_ids.long(), values_can_be_checked(input_ids)
    if gathered and not (is_free or torch.compiler.is_compiling()):
        return ids
    ids = ids * attended  # one launch; `where` with a number takes two
    if is_free:
        extremes = ids.aminmax() if ids.numel() > 0 else ()
        for extreme in (x.item() for x in extremes):
            if not 0 <= extreme < vocab_size:
                raise ValueError(
                    f"expected `{name}` in [0, V) with V = {vocab_size}, got {extreme}"
                )
    elif torch.compiler.is_compiling() or not transforms_are_active():
        # An assertion on the device needs no sync in eager mode and no graph break.
        is_inside = ((ids >= 0) & (ids < vocab_size)).all()
        assert_on_device(is_inside, f"expected `{name}` in [0, V)")
    return ids


def distinct_ids(ids: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row ``[B, S]`` and mark all but the first occurrence of every attended id."""
    # An attended id becomes an odd key, what is not attended 0, as is the key before the first.
    keys = torch.addcmul(attended, ids, attended, value=2).sort(-1).values
    return keys >> 1, keys == nnf.pad(keys[..., :-1], (1, 0))


def check_ids(name: str, token_ids: TokenIds | None) -> Tensor | tuple[int, ...] | None:
    """Return token ids as a tensor ``[n]`` or a tuple; an iterator could be read only once."""
    if token_ids is None:
        return None
    if isinstance(token_ids, Tensor):
        if token_ids.numel() == 0:  # torch.tensor([]) is floating point
            return ()
        if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
            raise TypeError(f"expected `{name}` to be integers, got {token_ids.dtype}")
        return token_ids.reshape(-1)
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise TypeError(f"expected `{name}` to be integers, got {token_ids!r}")
    ids = tuple(token_ids)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"expected `{name}` to be integers, got {token!r} among them")
    return ids


def id_mask(
    name: str, token_ids: TokenIds | None, vocab_size: int, device: torch.device
) -> Tensor | None:
    """Return a set of token ids as a mask ``[V]``, or ``None`` if there are no ids."""
    ids = check_ids(name, token_ids)
    if ids is None or len(ids) == 0:
        return None
    if not isinstance(ids, Tensor):
        ids = torch.tensor(ids, device="cpu")  # whatever the default device: values are read below
    attended = torch.ones_like(ids, dtype=torch.bool)  # unsigned ids do not multiply one another
    ids = attended_ids(name, ids, attended, vocab_size)
    if device.type not in ("cpu", "meta") and values_can_be_checked(ids):
        ids = ids.pin_memory()  # the copy to the device is then asynchronous
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    # A copy to the CPU is read at once, so it must be synchronous.
    return mask.index_fill(0, ids.to(device, non_blocking=device.type != "cpu"), True)
