"""Values on their way to the host: what the tensor held, read without a wait where possible."""

from types import SimpleNamespace

import torch

from sparse_losses._core.host_copy import HostCopy


def test_values_of_a_cpu_tensor_are_there_at_once():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = HostCopy(x.exp())
    assert torch.equal(copy.read(), copy.read())
    assert copy.read().tolist() == x.exp().tolist()
    assert not copy.read().requires_grad, "it holds no graph"


class _OnAccelerator:
    """Stands in for a tensor on an accelerator, which the tests have not."""

    device, is_cpu = torch.device("cuda"), False

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
    copy = HostCopy(_OnAccelerator(log))
    assert log == ["copy to cpu", "record"]
    assert copy.read().tolist() == copy.read().tolist() == [1.0, 2.0]
    assert log == ["copy to cpu", "record", "wait"], "the event is waited for once"
