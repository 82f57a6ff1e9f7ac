"""Values on their way to the host: what the tensor held, read without a wait where possible."""

from unittest import mock

import torch

from sparse_losses._core.host_copy import HostCopy


def test_values_of_a_cpu_tensor_are_there_at_once():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    values = HostCopy(x.exp()).read()
    assert values.tolist() == x.exp().tolist()
    assert not values.requires_grad, "it holds no graph"


def test_copy_from_an_accelerator_is_waited_for_when_it_is_read(monkeypatch):
    """A mock stands in for a tensor on an accelerator, which the tests have not."""
    seen = mock.Mock()
    monkeypatch.setattr(torch, "Event", seen.event)
    x, values = seen.tensor, torch.tensor([1.0, 2.0])
    x.is_cpu, x.detach.return_value, x.to.return_value = False, x, values
    copy = HostCopy(x)
    started = [mock.call.tensor.detach(), mock.call.tensor.to("cpu", non_blocking=True)]
    started += [mock.call.event(x.device), mock.call.event().record()]
    assert seen.mock_calls == started
    assert copy.read() is copy.read() is values
    assert seen.mock_calls == [*started, mock.call.event().synchronize()], "waited for once"
