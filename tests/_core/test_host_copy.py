"""Values on their way to the host: what the tensor held, read without a wait where possible."""

from types import SimpleNamespace

import torch

from sparse_losses._core.host_copy import HostCopy


def test_values_of_a_cpu_tensor_are_there_at_once_and_stay_as_they_were():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = HostCopy(x, torch.Tensor.tolist)
    with torch.no_grad():
        x.zero_()
    assert copy.is_here
    assert copy.read() == copy.read() == [1.0, 2.0]
    assert not HostCopy(x.exp(), lambda values: values.requires_grad).read(), "it holds no graph"


class _OnAccelerator:
    """Stands in for a tensor on an accelerator, which the tests have not."""

    device = torch.device("cuda")

    def __init__(self, log):
        self.log = log

    def detach(self):
        return self

    def to(self, device, non_blocking):
        self.log.append(f"copy to {device}" if non_blocking else "wait")
        return torch.tensor([1.0, 2.0])


def test_copy_from_an_accelerator_is_waited_for_when_it_is_read(monkeypatch):
    log = []
    event = SimpleNamespace(
        record=lambda: log.append("record"), synchronize=lambda: log.append("wait")
    )
    monkeypatch.setattr(torch, "Event", lambda device: event)
    copy = HostCopy(_OnAccelerator(log), torch.Tensor.tolist)
    assert not copy.is_here
    assert log == ["copy to cpu", "record"]
    assert copy.read() == copy.read() == [1.0, 2.0]
    assert log == ["copy to cpu", "record", "wait"], "the event is waited for once"
