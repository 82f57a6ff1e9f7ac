"""Token ids and masks: what is refused, by which number, and where no number may be read."""

import functools

import numpy as np
import pytest
import torch

from sparse_losses._core import token_ids
from sparse_losses._core.token_ids import as_mask, attended_ids, id_mask

V = 5


def attended(*ids, mask=None, **options):
    ids = torch.tensor(ids)
    return attended_ids("ids", ids, torch.ones_like(ids) if mask is None else mask, V, **options)


@pytest.fixture
def unread(monkeypatch):
    """As on an accelerator: a value could be read by a wait only. Assertions are at once here."""
    monkeypatch.setattr(token_ids, "values_can_be_checked", lambda *_: False)
    return monkeypatch


def test_where_values_are_not_read_the_device_asserts(unread):
    assert attended(0, V - 1).tolist() == [0, V - 1]
    for outside in (-1, V):
        with pytest.raises(RuntimeError, match=r"expected `ids` in \[0, V\)"):
            attended(2, outside)


def test_the_gather_that_follows_asserts_by_itself_but_in_a_graph(unread):
    assert attended(2, V, gathered=True).tolist() == [2, V]
    unread.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="expected `ids`"):
        attended(2, V, gathered=True)


def test_masks_are_looked_at_only_where_reading_is_free(unread):
    mask = torch.tensor([0.0, 0.5, 1.0])
    assert as_mask("mask", mask).tolist() == [False, True, True]
    unread.undo()
    with pytest.raises(ValueError, match=r"expected `mask` to be 0 or 1, got 0\.5"):
        as_mask("mask", mask)


UNSIGNED = [
    functools.partial(torch.tensor, dtype=dtype)
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
]


@pytest.mark.parametrize("kind", [*UNSIGNED, torch.tensor, np.array, list, tuple, set])
def test_ignored_ids_come_in_any_container_unsigned_or_not(kind):
    mask = id_mask("ids", kind([2, 4]), V, torch.device("cpu"))
    assert mask.nonzero().tolist() == [[2], [4]]
    assert id_mask("ids", kind([]), V, torch.device("cpu")) is None
