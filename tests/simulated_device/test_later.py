"""What is on its way to the host is what the tensor held, and is read without a wait."""

import pytest
import torch

from sparse_losses._core.later import Later
from tools import simulated_device


@pytest.fixture
def sim():
    if reason := simulated_device.why_not():
        pytest.skip(reason)
    simulated_device.start()
    return torch.device("sim")


def test_on_the_cpu_it_is_there_at_once_and_stays_as_it_was():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    later = Later(x, torch.Tensor.tolist)
    with torch.no_grad():
        x.zero_()
    assert later.is_here
    assert later.read() == later.read() == [1.0, 2.0]
    assert not Later(x.exp(), lambda values: values.requires_grad).read(), "it holds no graph"


def test_from_a_device_it_arrives_while_the_device_works(sim):
    x = torch.tensor([1.0, 2.0]).to(sim)
    with simulated_device.lag(5), simulated_device.counting() as counts:
        later = Later(x, torch.Tensor.tolist)
        for _ in range(5):
            x.zero_()
        found = later.read()
    assert (later.is_here, found, later.read()) == (False, [1.0, 2.0], [1.0, 2.0])
    assert counts.waits == 0


def test_what_has_not_arrived_is_waited_for(sim):
    x = torch.tensor([1.0, 2.0]).to(sim)
    with simulated_device.lag(5), simulated_device.counting() as counts:
        found = Later(x, torch.Tensor.tolist).read()
    assert found == [1.0, 2.0]
    assert counts.waits == 1
