"""The simulated device keeps the rules that it is there for."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn
from torch.utils.checkpoint import checkpoint

from tools import simulated_device

if reason := simulated_device.why_not():
    pytest.skip(reason, allow_module_level=True)
simulated_device.start()
SIM = torch.device("sim")
HALVES = [torch.bfloat16, torch.float16]


def launched(function, *args, **kwargs) -> Counter:
    """Names of what a call launches."""
    with simulated_device.counting() as counts:
        function(*args, **kwargs)
    return counts.names


def waits(function, *args, **kwargs) -> int:
    with simulated_device.counting() as counts:
        function(*args, **kwargs)
    return counts.waits


# ------------------------------------------------------------------------------------------------
# Values


def test_kernels_compute_what_the_cpu_computes():
    x, y = torch.randn(4, 3), torch.randn(3, 5)
    there = [x.to(SIM).requires_grad_(), y.to(SIM).requires_grad_()]
    here = [x.requires_grad_(), y.requires_grad_()]
    for device, (a, b) in (("cpu", here), ("sim", there)):
        value = nnf.cross_entropy(nnf.normalize(a) @ b, torch.arange(4, device=device))
        value.backward()
    for a, b in zip(here, there, strict=True):
        assert b.grad.device.type == "sim"
        assert torch.equal(a.grad, b.grad.cpu())


def test_fresh_memory_is_nan():
    assert torch.empty(3, device=SIM).isnan().all()
    assert torch.empty(3, device=SIM, dtype=torch.bfloat16).isnan().all()
    assert torch.zeros(3, device=SIM).new_empty(2, 2).isnan().all()
    assert torch.ones(2, device=SIM).resize_(5)[2:].isnan().all()


def test_an_operation_in_place_changes_the_tensor_and_its_views():
    x = torch.zeros(3, 4, device=SIM)
    row = x[1]
    assert row.add_(1) is row
    x[:, 0] = 5
    x.t()[3].fill_(7)
    assert x.tolist() == [[5, 0, 0, 7], [5, 1, 1, 7], [5, 0, 0, 7]]


def test_a_result_may_be_written_into_a_tensor_of_another_size():
    out = torch.empty(0, device=SIM)
    torch.add(torch.ones(3, device=SIM), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    values, places = torch.empty(0, device=SIM), torch.empty(0, dtype=torch.long, device=SIM)
    torch.max(torch.eye(2, device=SIM), 1, out=(values, places))
    assert (values.tolist(), places.tolist()) == ([1, 1], [0, 1])


def test_modules_survive_copying_and_pickling():
    layer = nn.Linear(3, 2, device=SIM)
    x = torch.randn(4, 3, device=SIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.weight.device == layer.weight.device
        assert torch.equal(other(x), layer(x))


def test_dropout_is_the_same_in_a_checkpoint():
    x = torch.ones(100, device=SIM, requires_grad=True)
    y = checkpoint(nnf.dropout, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)


def test_there_are_no_sparse_layouts():
    with pytest.raises(RuntimeError, match=r"Sparse|layout"):
        torch.eye(2, device=SIM).to_sparse()


# ------------------------------------------------------------------------------------------------
# Operands


@pytest.mark.parametrize(
    "call",
    [
        lambda x, cpu: x + cpu,
        lambda x, cpu: x @ cpu,
        lambda x, cpu: torch.cat([x, cpu]),
        lambda x, cpu: torch.where(x > 0, x, cpu),
        lambda x, cpu: cpu.add_(x),
        lambda x, cpu: torch.tensor(0.0).add_(x.sum()),
        lambda x, cpu: cpu[x.long()],
        lambda x, cpu: torch.mm(x.half(), cpu.half(), out_dtype=torch.float32),
    ],
)
def test_a_tensor_on_the_cpu_among_the_operands_is_refused(call):
    x = torch.ones(2, 2, device=SIM)
    with pytest.raises(RuntimeError, match="on the same device"):
        call(x, torch.ones(2, 2))


def test_a_number_on_the_cpu_is_none():
    x = torch.ones(2, 2, device=SIM)
    assert waits(lambda: x * torch.tensor(3.0) + torch.where(x > 0, x, torch.tensor(1.0))) == 0
    assert (x.half() * torch.tensor(3.0)).dtype == torch.float16


def test_an_index_on_the_cpu_is_copied_there():
    x = torch.arange(4.0, device=SIM)
    with simulated_device.counting() as counts:
        found = x[torch.tensor([3, 1])]
    assert (counts.names["copy"], counts.waits) == (1, 1)
    assert found.tolist() == [3, 1]


# ------------------------------------------------------------------------------------------------
# Launches


def test_what_a_composite_operation_launches_is_counted():
    x = torch.randn(4, 5, device=SIM, requires_grad=True)
    names = ["amax", "abs", "eq", "masked_fill_", "sub", "exp_", "sum", "log_", "add_"]
    assert launched(torch.logsumexp, x.detach(), 1) == Counter(names)
    loss = nnf.cross_entropy(x, torch.arange(4, device=SIM))
    forward = launched(nnf.cross_entropy, x, torch.arange(4, device=SIM))
    assert forward == Counter(["_log_softmax", "nll_loss_forward"])
    backward = launched(loss.backward)
    assert backward == Counter(
        ["fill_", "nll_loss_backward", "_log_softmax_backward_data"]
    ) or backward == Counter(["ones_like", "nll_loss_backward", "_log_softmax_backward_data"])


def test_views_and_empty_memory_are_no_launches():
    def look(x):
        x.view(4, 3).t()[1:, None].expand(2, 2, 4).unfold(2, 2, 1).detach()
        x.new_empty(5), torch.empty_like(x), x.reshape(12), x.flatten().unbind()

    assert not launched(look, torch.ones(3, 4, device=SIM))


def test_layer_norm_and_an_optimizer_over_many_tensors_are_few_launches():
    layers = nn.Sequential(*[nn.Linear(3, 3, device=SIM) for _ in range(20)])
    x = torch.ones(2, 3, device=SIM)
    assert launched(nnf.layer_norm, x, (3,)) == Counter(["native_layer_norm"])
    layers(x).sum().backward()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    optimizer.step()  # makes its state
    before = [p.detach().cpu() for p in layers.parameters()]
    assert launched(optimizer.step).total() < 12
    assert not any(map(torch.equal, before, [p.detach().cpu() for p in layers.parameters()]))


def test_bytes_are_what_is_read_and_written():
    x = torch.ones(8, 4, device=SIM)
    row = torch.ones(1, 4, device=SIM)

    def moved(function, *args):
        with simulated_device.counting() as counts:
            function(*args)
        return counts.bytes

    n = x.nbytes
    assert moved(torch.add, x, x) == 3 * n
    assert moved(torch.add, x, 1) == 2 * n
    assert moved(torch.add, x, row) == moved(torch.add, x, row.expand(8, 4)) == 2 * n + row.nbytes
    assert moved(x.add_, x) == 3 * n
    assert moved(x.zero_) == n
    assert moved(x.clone) == 2 * n
    assert moved(x.half) == n + n // 2
    assert moved(torch.sum, x) == n + 4
    assert moved(torch.mm, x, row.t()) == n + row.nbytes + 8 * 4


def test_a_gather_reads_and_a_scatter_writes_only_its_entries():
    table = torch.ones(1000, 4, device=SIM)
    places = torch.tensor([[3], [5]], device=SIM)

    def moved(function, *args):
        with simulated_device.counting() as counts:
            function(*args)
        return counts.bytes

    ids, two = places.nbytes, 2 * 4
    assert moved(table.gather, 0, places) == ids + 2 * two
    assert moved(nnf.embedding, places, table) == ids + 2 * 4 * two
    assert moved(lambda: table[places[:, 0]]) == ids + 2 * 4 * two
    source = torch.ones(2, 1, device=SIM)
    assert moved(table.scatter_, 0, places, source) == ids + source.nbytes + 2 * two
    assert moved(table.scatter_add_, 0, places, source) == ids + source.nbytes + 2 * two
    assert moved(table.scatter, 0, places, source) >= 2 * table.nbytes


def test_threads_of_autograd_are_counted():
    x = torch.ones(3, device=SIM, requires_grad=True)
    y = x.exp().sum()
    assert launched(y.backward)["mul"] == 1


# ------------------------------------------------------------------------------------------------
# Products


def test_products_are_counted_in_the_dtype_of_their_factors():
    a, b = torch.ones(3, 4, device=SIM), torch.ones(4, 5, device=SIM)
    flops = 2 * 3 * 4 * 5
    with simulated_device.counting() as counts:
        a @ b, torch.addmm(torch.ones(5, device=SIM), a.half(), b.half(), out_dtype=torch.float32)
        torch.bmm(a.bfloat16()[None], b.bfloat16()[None]), a @ b[:, 0], a[0] @ b[:, 0]
    assert counts.flops == {
        torch.float32: flops + 2 * 3 * 4 + 2 * 4,
        torch.float16: flops,
        torch.bfloat16: flops,
    }


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_multiplied_and_summed_in_fp32(dtype):
    a = torch.randn(3, 64, dtype=dtype, device=SIM)
    b = torch.randn(64, 5, dtype=dtype, device=SIM)
    c = torch.randn(3, 5, device=SIM)
    single = {"out_dtype": torch.float32}
    wanted = a.float() @ b.float()
    for found, plus in (
        (torch.mm(a, b, **single), 0.0),
        (torch.bmm(a[None], b[None], **single)[0], 0.0),
        (torch.addmm(c, a, b, **single), c),
        (torch.baddbmm(c[None], a[None], b[None], **single)[0], c),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted + plus, rtol=1e-6, atol=1e-5)
    assert launched(torch.mm, a, b, **single) == Counter(["mm"])
    assert torch.mm(a, b, out_dtype=dtype).dtype == dtype


def test_out_dtype_is_refused_as_on_a_gpu():
    a = torch.ones(2, 2, device=SIM)
    for one, dtype in ((a, torch.float64), (a, torch.float16), (a.half(), torch.bfloat16)):
        with pytest.raises(RuntimeError, match="expected out_dtype"):
            torch.mm(one, one, out_dtype=dtype)


def test_autocast_lowers_products_and_raises_sums():
    layer, x = nn.Linear(4, 3, device=SIM), torch.ones(2, 4, device=SIM)
    for dtype in HALVES:
        with torch.autocast("sim", dtype=dtype):
            y = layer(x)
            assert y.dtype == (x @ x.T).dtype == torch.einsum("bi,ci->bc", x, x).dtype == dtype
            assert y.exp().dtype == y.softmax(1).dtype == y.sum().dtype == torch.float32
            assert nnf.layer_norm(y, (3,)).dtype == nnf.mse_loss(y, y).dtype == torch.float32
            assert torch.cat([y, x[:, :3]]).dtype == torch.float32
            with torch.autocast("sim", enabled=False):
                assert (x @ x.T).dtype == torch.float32
    assert layer(x).dtype == torch.float32
    assert torch.amp.is_autocast_available("sim")


# ------------------------------------------------------------------------------------------------
# Waits


def test_what_depends_on_values_waits():
    x = torch.tensor([[1.0, 0.0], [2.0, 2.0]], device=SIM)
    counts = torch.tensor([1, 2], device=SIM)
    mask = x > 1
    for call in (
        lambda: x[0, 0].item(),
        lambda: bool((x > 0).any()),
        lambda: float(x.sum()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        lambda: x.masked_select(mask),
        lambda: x[mask],
        lambda: x.unique(),
        lambda: torch.equal(x, x),
        lambda: torch.bincount(counts),
        lambda: x.repeat_interleave(counts, 0),
        lambda: torch.tensor([1.0, 2.0], device=SIM),
        lambda: x.index_put_((mask,), x.new_ones(2)),
        lambda: torch.sim.synchronize(),
        lambda: torch.accelerator.synchronize(),
    ):
        assert waits(call) == 1, call
    assert x.repeat_interleave(counts, 0).tolist() == [[1, 0], [1, 1], [1, 1]]


def test_what_does_not_depend_on_values_does_not_wait():
    x = torch.tensor([[1.0, 0.0], [2.0, 2.0]], device=SIM)
    counts = torch.tensor([1, 2], device=SIM)
    mask = x > 1

    def calls():
        x.repeat_interleave(counts, 0, output_size=3), x.masked_fill(mask, 0.0), x.topk(1)
        x.sort(), x[counts - 1], torch.full((2,), 3.0, device=SIM), torch.arange(3, device=SIM)
        torch.where(mask, x, 0.0), torch.randn(3, device=SIM), x.cumsum(0), x.clone()

    assert waits(calls) == 0


def test_an_assignment_at_a_mask():
    x = torch.zeros(2, device=SIM)
    mask = torch.tensor([False, True], device=SIM)
    x[mask] = 3.0
    assert x.tolist() == [0, 3]
    x[mask] = torch.ones(1, device=SIM)
    assert x.tolist() == [0, 1]


def test_only_a_non_blocking_copy_of_pinned_memory_does_not_wait():
    plain, pinned = torch.ones(3), torch.ones(3).pin_memory()
    there = torch.ones(3, device=SIM)
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    assert waits(lambda: plain.to(SIM)) == waits(lambda: plain.to(SIM, non_blocking=True)) == 1
    assert waits(lambda: pinned.to(SIM)) == 1
    assert waits(lambda: pinned.to(SIM, non_blocking=True)) == 0
    assert waits(lambda: pinned.copy_(there)) == 1
    assert waits(lambda: pinned.copy_(there, non_blocking=True)) == 0
    assert waits(lambda: plain.copy_(there, non_blocking=True)) == 1
    assert waits(lambda: there.to("cpu", non_blocking=True)) == 0  # PyTorch makes pinned memory
    assert waits(lambda: there.to("cpu")) == 1


def test_a_value_that_is_read_before_its_event_is_nan():
    there = torch.tensor([4.0], device=SIM)
    with simulated_device.counting() as counts:
        here = torch.empty(1, pin_memory=True).copy_(there, non_blocking=True)
        there.fill_(5)  # after the copy
        event = torch.Event("sim")
        event.record()
        assert not event.query()
        assert here.isnan()
        assert counts.waits == 0
        event.synchronize()
        assert event.query()
    assert here.tolist() == [4.0]
    assert counts.waits == 1


def test_a_copy_that_has_had_time_to_arrive_costs_no_wait():
    there = torch.tensor([4.0], device=SIM)
    with simulated_device.lag(5), simulated_device.counting() as counts:
        here = torch.empty(1, pin_memory=True).copy_(there, non_blocking=True)
        event = torch.sim.Event()
        event.record()
        for _ in range(4):
            there.neg_()
        assert here.isnan()
        assert not event.query()
        there.neg_()
        assert event.query()
        event.synchronize()
        assert here.tolist() == [4.0]
    assert counts.waits == 0


def test_any_wait_brings_what_was_on_its_way():
    there = torch.tensor([4.0], device=SIM)
    here = torch.empty(1, pin_memory=True).copy_(there, non_blocking=True)
    assert here.isnan()
    there.item()
    assert here.tolist() == [4.0]


# ------------------------------------------------------------------------------------------------
# Memory


def test_the_peak_is_what_was_allocated_at_once():
    x = torch.ones(1000, device=SIM)
    with simulated_device.counting() as counts:
        y = x.exp()  # 4,000 bytes
        z = y + x  # 4,000 more
        del y
        z = z.double()  # 8,000 more, less y's
        del z
        x.add_(1)
    assert counts.peak_bytes == 12_000
    kept = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    y = x.exp()
    del y
    assert torch.sim.memory_allocated() == kept
    assert torch.sim.max_memory_allocated() == kept + 4000


# ------------------------------------------------------------------------------------------------
# Shapes alone


def step(device, rows=6):
    """A little of everything, forward and backward."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 5, device=device)
    x = torch.randn(rows, 8, device=device)
    mask = torch.rand(rows, 5, device=device) < 0.5
    ids = torch.randint(0, 5, (rows, 3), device=device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        hidden = nnf.layer_norm(layer(x), (5,)).masked_fill(mask, 0.0)
    top, place = hidden.max(1)
    loss = nnf.cross_entropy(hidden, place) + top.logsumexp(0) + hidden.gather(1, ids).mean()
    loss = loss + hidden.sort(1).values.cumsum(1).sum() + torch.cat([hidden, hidden]).std()
    loss.backward()
    torch.optim.AdamW(layer.parameters()).step()
    return loss.detach()


def test_shape_only_counts_what_computing_counts():
    with simulated_device.counting() as computed:
        value = step(SIM)
    assert value.isfinite()
    with simulated_device.shape_only(), simulated_device.counting() as counted:
        step(SIM)
    assert counted.operations == computed.operations
    assert counted.peak_bytes == computed.peak_bytes
    assert counted.launches > 50


def test_shape_only_holds_what_no_memory_holds():
    with simulated_device.shape_only(), simulated_device.counting() as counts:
        x = torch.ones(1 << 20, 1 << 20, device=SIM, dtype=torch.bfloat16)
        y = torch.mm(x, x.t(), out_dtype=torch.float32)
    assert y.shape == (1 << 20, 1 << 20)
    assert counts.flops == {torch.bfloat16: 2 << 60}
    assert counts.peak_bytes == 6 << 40
    with pytest.raises(RuntimeError, match="made in shape-only mode: nothing can read it"):
        y.sum()


def test_shape_only_refuses_to_read_values():
    with simulated_device.shape_only():
        x = torch.ones(3, device=SIM)
        for call in (x.sum().item, x.cpu, x.nonzero, lambda: x[x > 0]):
            with pytest.raises(RuntimeError, match="which shape-only mode has not"):
                call()
