"""A gate over the vocabulary, computed from the whole text."""

import torch
from torch import Tensor, nn

from sparse_losses._core.checks import check_shapes
from sparse_losses._core.token_ids import as_mask


class ContextGate(nn.Module):
    r"""A factor in (0, 1) for every token's logit, computed from the context.

    $$g = \sigma\bigl(W_2\, \mathrm{GELU}(W_1\, \mathrm{LayerNorm}(c) + b_1) + b_2\bigr)
    \qquad c = \mathrm{Attention}(q, H, H)$$

    A learned query $q$ attends over the hidden states $H$ of the attended tokens, and the context
    vector $c$ determines the gate of all tokens, which ``splade_head`` takes as ``gate=``.

    Args:
        hidden_size: H, divisible by ``num_heads``.
        vocab_size: $V$.
        gate_hidden: width between the two linear maps.
        num_heads: number of attention heads.
        dropout: dropout of the attention and between the maps, in [0, 1].

    Shape:
        ``hidden`` ``[B, S, H]`` and ``attention_mask`` ``[B, S]`` 0/1 or ``None`` give ``[B, V]``.

    Examples:
        >>> import torch
        >>> from sparse_losses import ContextGate, SpladeHead
        >>> embedding = torch.nn.Embedding(1000, 32)
        >>> gate, head = ContextGate(32, 1000), SpladeHead(embedding.weight)
        >>> hidden, mask = torch.randn(2, 7, 32), torch.ones(2, 7)
        >>> head(hidden, mask, gate=gate(hidden, mask)).shape
        torch.Size([2, 1000])

    References:
        Context-gated sparse expansion, from the notes of a Korean neural sparse retriever (V28b).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        gate_hidden: int = 256,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.settings = {"gate_hidden": gate_hidden, "num_heads": num_heads, "dropout": dropout}
        self.query = nn.Parameter(torch.empty(1, 1, hidden_size))
        nn.init.normal_(self.query, std=0.02)
        self.attention = nn.MultiheadAttention(
            hidden_size, num_heads, dropout=dropout, batch_first=True
        )
        self.norm = nn.LayerNorm(hidden_size)
        first, last = nn.Linear(hidden_size, gate_hidden), nn.Linear(gate_hidden, vocab_size)
        self.map = nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), last)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the gate ``[B, V]``."""
        check_shapes(hidden=(hidden, "B S H"), attention_mask=(attention_mask, "B S, optional"))
        if hidden.shape[0] == 0:
            return hidden.new_zeros(0, self.vocab_size)
        if hidden.shape[1] == 0:  # no tokens
            hidden, attention_mask = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[2]), None
        ignored = None
        if attention_mask is not None:
            attended = as_mask("attention_mask", attention_mask)
            hidden = torch.where(attended[:, :, None], hidden, 0.0)  # removes a NaN of padding
            # A softmax over nothing is NaN, so a text without tokens attends to zeros.
            ignored = ~attended & attended.any(1, keepdim=True)
        query = self.query.expand(hidden.shape[0], -1, -1)
        context, _ = self.attention(query, hidden, hidden, ignored, need_weights=False)
        gate: Tensor = self.map(self.norm(context[:, 0])).sigmoid()
        return gate
