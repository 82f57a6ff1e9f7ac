import torch

from sparse_losses import ContextGate

B, S, H, V = 3, 6, 8, 50


def problem():
    torch.manual_seed(0)
    gate = ContextGate(H, V, gate_hidden=16, num_heads=2).double().eval()
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, 4:] = mask[1, 1:] = 0
    return gate, torch.randn(B, S, H, dtype=torch.float64), mask


def gate_with_loops(gate, hidden, mask):
    """Attention of one query, head by head, and the rest."""
    weight, bias = gate.attention.in_proj_weight, gate.attention.in_proj_bias
    width, rows = H // 2, []
    for states, on in zip(hidden, mask, strict=True):
        states = states[on != 0]
        query = weight[:H] @ gate.query[0, 0] + bias[:H]
        keys = states @ weight[H : 2 * H].T + bias[H : 2 * H]
        values = states @ weight[2 * H :].T + bias[2 * H :]
        heads = []
        for start in range(0, H, width):
            part = slice(start, start + width)
            share = (keys[:, part] @ query[part] / width**0.5).softmax(0)
            heads.append(share @ values[:, part])
        context = gate.attention.out_proj(torch.cat(heads))
        centred = context - context.mean()
        context = centred / (centred.square().mean() + gate.norm.eps).sqrt()
        inner = gate.map[0](context * gate.norm.weight + gate.norm.bias)
        inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        rows.append(1 / (1 + (-gate.map[3](inner)).exp()))
    return torch.stack(rows)


def test_gate_is_its_formula_which_ignores_masked_states_with_their_nan():
    gate, hidden, mask = problem()
    everything = torch.ones_like(mask)
    torch.testing.assert_close(gate(hidden), gate_with_loops(gate, hidden, everything))
    hidden[0, 5] = torch.nan
    result = gate(hidden.requires_grad_(), mask)
    torch.testing.assert_close(result, gate_with_loops(gate, hidden, mask))
    result.sum().backward()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[0, 4:].any()


def test_text_without_tokens_has_a_gate_and_no_gradient():
    gate, hidden, mask = problem()
    mask[2] = 0
    gate(hidden.requires_grad_(), mask)[2].sum().backward()
    assert not hidden.grad.any()
    for shape in ((0, 4, H), (2, 0, H)):
        value = gate(torch.zeros(shape, dtype=torch.float64), torch.ones(shape[:2]))
        assert value.shape == (shape[0], V)
        assert ((value > 0) & (value < 1)).all()
