"""A set of ids reaches a device without a wait, and leaves it with its values."""

import pytest
import torch

from sparse_losses import idf_penalty
from sparse_losses._core.token_ids import id_mask
from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def sim():
    simulated_device.start()
    return torch.device("sim")


def test_ids_of_the_host_are_copied_without_a_wait(sim):
    with simulated_device.counting() as counts:
        mask = id_mask("ids", [1, 3, 3], 5, sim)
    assert counts.waits == 0
    assert mask.device.type == "sim"
    assert mask.tolist() == [False, True, False, True, False]


def test_ids_of_a_device_are_there_when_the_host_reads_them(sim):
    ids = torch.tensor([1, 3]).to(sim)
    with simulated_device.lag(5):
        mask = id_mask("ids", ids, 5, torch.device("cpu"))
    assert mask.tolist() == [False, True, False, True, False]


def test_a_penalty_names_an_id_outside_on_any_device(sim):
    idf, ids = torch.arange(5.0), torch.tensor([1, 5]).to(sim)
    with pytest.raises(ValueError, match=r"`special_token_ids` in .* got 5"):
        idf_penalty(idf, special_token_ids=ids)
    assert idf_penalty(idf, special_token_ids=ids[:1])[1] == 100
