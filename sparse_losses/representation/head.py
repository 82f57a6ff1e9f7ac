"""The SPLADE head: from hidden states to sparse vectors without storing ``[B, S, V]``."""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_losses._core.activation import (
    Activation,
    check_threshold,
    pruned_weights,
    splade_activation,
)
from sparse_losses._core.checks import (
    check_choice,
    check_number,
    check_shapes,
    values_can_be_checked,
)
from sparse_losses._core.implementations import (
    Arguments,
    Implementation,
    as_dict,
    choose,
    is_exported,
)
from sparse_losses._core.loss import LossModule, loss
from sparse_losses._core.own_gradient import can_bring_its_gradient
from sparse_losses._core.precision import compute_dtype
from sparse_losses.fast.head import largest_logits
from sparse_losses.fast.head_entries import Inputs, csr_head, operand_type
from sparse_losses.fast.head_packed import packed_entries
from sparse_losses.fast.head_tiles import tiled_entries
from sparse_losses.representation._language_model import head_of, projection_of, unwrapped
from sparse_losses.representation.scale import SELF_DOT, measured_scale, multiply, scaled_parameters

Impl = Literal["auto", "definition", "packed", "tiles"]

# Logits of all positions up to which the definition is the fastest, on a CPU.
SMALL = 1 << 16
EXPORTED = 1 << 13  # tokens of the vocabulary whose logits an exported head holds at once


@loss(
    hidden="B S H, layer",
    weight="V H, layer",
    bias="V, optional",
    attention_mask="B S, mask, optional",
    gate="B V, optional",
    softcap="> 0",
)
def splade_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    activation: Activation = "relu",
    softcap: float | None = None,
    threshold: float | Tensor | None = None,
    return_logits: bool = False,
    layout: torch.layout = torch.strided,
    sparse_grad: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Vocabulary projection, SPLADE activation and max pooling in one.

    $$x_{ij} = \log\Bigl(1 + \mathrm{ReLU}\bigl(g_{ij} \,
    \bigl(\max_{s \,:\, m_{is} = 1} h_{is} \cdot e_j + b_j\bigr)\bigr)\Bigr)$$

    $h_{is}$ are the hidden states of text $i$, $e_j$ and $b_j$ the row and bias of token $j$ in the
    vocabulary projection, $g$ the gate (1 without one). The result equals
    ``splade_pool(hidden @ weight.T + bias, attention_mask)``; only the definition stores
    ``[B, S, V]``. The gradient costs what the active entries cost, unless many are active.
    Of equal scores the first position gets the gradient on the CPU, any position elsewhere.

    The head is a layer of the model. On an accelerator it multiplies hidden states and weight in
    their own dtype, or in autocast's; a CPU's results, and all later operations, are of fp32.

    Args:
        hidden: ``[B, S, H]`` floating.
        weight: ``[V, H]`` floating; often the embedding matrix.
        bias: ``[V]``.
        attention_mask: ``[B, S]`` bool, int or float 0/1; masked positions are ignored.
        gate: ``[B, V]`` in [0, 1]; multiplies the pooled logits.
        activation: ``"relu"``, or ``"log1p_relu"``, which takes $\log(1 + x)$ once more.
        softcap: $c$ of a model that caps its logits $z$ as $c \tanh(z / c)$, before the gate.
        threshold: a number or ``[V]``, without a gradient; an entry whose pooled logit after the
            gate is not above it is 0. Numbers below 0 act as 0.
        return_logits: also return the signed pooled logits after the gate, also of inactive tokens.
        layout: ``torch.sparse_csr`` returns a CSR tensor of the active entries, without storing
            ``[B, V]`` or its gradient. On an accelerator the host waits for their number. It needs
            eager mode, and has no second derivatives and no ``return_logits``.
        sparse_grad: give ``weight`` a sparse gradient of the rows with an active entry, as
            ``nn.Embedding(sparse=True)`` does (by ``"packed"``). Compiled, the gradient is dense.
        impl: how to compute the value; all implementations give the same value and gradient.
            ``"packed"`` is for the CPU and skips padding and inactive entries. ``"tiles"`` never
            waits for the device. ``"auto"`` uses ``"packed"`` on the CPU, but ``"definition"`` for
            few logits, and for ``sparse_grad``, else ``"tiles"``.

    Returns:
        Activations ``[B, V]`` >= 0, fp32 (fp64 if a tensor is fp64); with ``return_logits`` a pair
        with the pooled logits. Rows without any attended position are 0 in both and have no
        gradient. Second derivatives work; ``torch.func`` transforms use the definition.

    Raises:
        ValueError: for wrong shapes or devices, a mask that is not 0/1, a gate outside [0, 1], an
            ``impl`` that cannot take the call.
        TypeError: for wrong dtypes.

    Examples:
        >>> import torch
        >>> from sparse_losses.functional import splade_head
        >>> hidden = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
        >>> weight = torch.tensor([[1.0, 1.0], [-1.0, 0.5], [-1.0, -1.0]])
        >>> splade_head(hidden, weight, attention_mask=torch.tensor([[1, 1, 0]]))  # log 3, log 2
        tensor([[1.0986, 0.6931, 0.0000]])

    References:
        SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval, eq. 6. Sparton
        keeps only the arg-max for the backward pass. ``"log1p_relu"``: Exploring the l0
        Sparsification for Inference-free Sparse Retrievers.
    """
    if weight.shape[0] == 0:
        raise ValueError("expected `weight` of at least one token, got V = 0")
    _check_gate(gate)
    check_threshold(threshold, weight.shape[0])
    if impl == "definition" and sparse_grad:
        raise ValueError('expected sparse_grad=False with impl="definition"')
    check_choice("layout", layout, (torch.strided, torch.sparse_csr))
    if layout == torch.sparse_csr and return_logits:
        raise ValueError("expected return_logits=False with layout=torch.sparse_csr")
    if attention_mask is None and hidden.shape[1] == 0:  # then no text has a maximum
        attention_mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
    dtype = compute_dtype(hidden=hidden, weight=weight, bias=bias, gate=gate)
    inputs = Inputs(hidden, weight, bias, attention_mask, gate, dtype)
    asked = {"sparse_grad": sparse_grad, "layout": layout}
    chosen = choose(IMPLEMENTATIONS, impl, {**as_dict(inputs), **asked})
    options: Any = {"activation": activation, "softcap": softcap, "threshold": threshold}
    if layout == torch.sparse_csr:
        if chosen is None or not can_bring_its_gradient(hidden, weight):
            raise ValueError(
                'expected eager mode and impl="packed" or "tiles" with layout=torch.sparse_csr, '
                "got the definition, a compiled or exported call or a transform of torch.func"
            )
        return csr_head(FIND_ENTRIES[chosen.name], inputs, sparse_grad, **options)
    if chosen is None:
        logits, absent = _definition(inputs)
    else:
        logits, absent = chosen.compute(inputs, chosen.name, return_logits, sparse_grad)
    return splade_activation(logits, absent, gate, return_logits=return_logits, **options)


def _definition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute all logits at once, by differentiable operations; exported, tile by tile."""
    hidden, weight, bias, attended, _, dtype = inputs
    if attended is None:
        attended = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
    # A NaN at a masked position would reach the gradient, because 0 * NaN is NaN.
    hidden = torch.where(attended[..., None], hidden, 0.0)
    operands = operand_type(hidden, weight, dtype)
    hidden, found = hidden.to(operands), []
    for tile in torch.split(weight, EXPORTED if is_exported() else len(weight)):
        scores = hidden @ tile.to(operands).mT
        if hidden.shape[1] > 0:
            scores = torch.where(attended[..., None], scores, -torch.inf)
        found.append(scores.max(1).values if hidden.shape[1] else scores.sum(1))
    highest = (found[0] if len(found) == 1 else torch.cat(found, 1)).to(dtype)
    absent = attended.logical_not().all(1, keepdim=True)
    return highest if bias is None else highest + bias, absent


def _check_gate(gate: Tensor | None) -> None:
    if gate is None or not values_can_be_checked(gate) or gate.numel() == 0:
        return
    low, high = (x.item() for x in gate.aminmax())
    if low < 0 or high > 1:  # a NaN passes and shows in the result
        raise ValueError(f"expected `gate` in [0, 1], got values from {low:g} to {high:g}")


def _tiles_reason(arguments: Arguments) -> str | None:
    batch, length, _ = arguments["hidden"].shape
    if batch == 0 or length == 0:
        return f"at least one position, got {[batch, length]},"
    if arguments["sparse_grad"] and not torch.compiler.is_compiling():
        return "sparse_grad=False"
    return None


def _prefers_packed(arguments: Arguments) -> bool:
    if arguments["hidden"].is_cpu:
        return _prefers_tiles(arguments)
    return arguments["sparse_grad"] and not torch.compiler.is_compiling()


def _prefers_tiles(arguments: Arguments) -> bool:
    """Whether the definition is slower; it is not for few logits on a CPU."""
    hidden, is_sparse = arguments["hidden"], arguments["layout"] == torch.sparse_csr
    if not hidden.is_cpu or is_sparse or arguments["sparse_grad"] or torch.compiler.is_compiling():
        return True
    return bool(hidden.shape[0] * hidden.shape[1] * len(arguments["weight"]) > SMALL)


IMPLEMENTATIONS = (
    Implementation("packed", lambda _: None, _prefers_packed, largest_logits, compiles=True),
    Implementation("tiles", _tiles_reason, _prefers_tiles, largest_logits, compiles=True),
)
FIND_ENTRIES = {"packed": packed_entries, "tiles": tiled_entries}


class SpladeHead(LossModule):
    """Module of ``splade_head``; see there for the formula and the arguments.

    An ``nn.Parameter`` is used as it is, so that a matrix tied to the embeddings stays tied; a
    plain tensor becomes a buffer, which is not trained.

    Args:
        weight: ``[V, H]``.
        bias: ``[V]``.
        transform: layers that are applied to the hidden states first, as a masked language model
            has before its vocabulary projection.
        activation: as in the function, like ``softcap``, ``threshold``, ``layout``,
            ``sparse_grad`` and ``impl``.
        logit_scale: a constant factor > 0 on the logits, before the soft cap. ``"auto"`` measures
            it on the first batch in training mode: texts then have a dot product of 64 with
            themselves, on average. Before, it is 1.

    Examples:
        >>> import torch
        >>> from sparse_losses import SpladeHead
        >>> embedding = torch.nn.Embedding(1000, 16)
        >>> head = SpladeHead(embedding.weight)
        >>> head(torch.randn(2, 5, 16), torch.ones(2, 5)).shape
        torch.Size([2, 1000])
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    threshold: float | Tensor | None
    measured_scale: Tensor | None
    keep_at_least: int = 0  # largest entries that `threshold` leaves in every row; of `calibrate`

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        transform: nn.Module | None = None,
        activation: Activation = "relu",
        softcap: float | None = None,
        threshold: float | Tensor | None = None,
        logit_scale: float | Literal["auto"] = 1.0,
        layout: torch.layout = torch.strided,
        sparse_grad: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(splade_head, locals())
        check_shapes(weight=(weight, "V H"), bias=(bias, "V, optional"))
        check_threshold(threshold, len(weight))
        is_auto = logit_scale == "auto"
        self.transform, self.logit_scale = transform, 1.0 if is_auto else float(logit_scale)
        check_number("logit_scale", self.logit_scale, minimum=0.0, exclusive=True)
        for name, tensor in (("weight", weight), ("bias", bias)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_constant(name, tensor)
        if isinstance(threshold, Tensor):
            del self.threshold
            self.register_buffer("threshold", threshold.detach())
        # A model's projection, which may have adapters, and its size. It is no submodule of ours.
        self._linear: tuple[Any, ...] = ()
        self._places: tuple[Any, ...] = ()  # of the layers before it: owner, name, layer
        self._folds_into: tuple[Tensor, ...] = ()
        self.awaits_scale = False
        self.register_buffer("measured_scale", None)
        if is_auto:
            self._await_scale()

    def _await_scale(self, *, fold: bool = False) -> None:
        """Measure the scale on the next batch in training mode; ``fold`` it if the head can."""
        empty = torch.full((), torch.nan, dtype=torch.float32, device=self.weight.device)
        self.measured_scale, self.awaits_scale = empty, True
        self._folds_into = tuple(scaled_parameters(self)) if fold else ()

    def _can_fold(self) -> bool:
        """Return whether the parameters that the scale goes to are in use; FSDP2 has others."""
        present = {id(parameter) for parameter in self.parameters()}
        return bool(self._folds_into) and all(id(x) in present for x in self._folds_into)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.measured_scale is not None:
            self.awaits_scale = bool(self.measured_scale.isnan())

    @torch.no_grad()
    def _measure(self, hidden: Tensor, attention_mask: Tensor | None, gate: Tensor | None) -> None:
        self.awaits_scale = False
        assert self.measured_scale is not None
        self.measured_scale.fill_(1.0)
        plain: Any = {"return_logits": True}
        _, logits = splade_head(*self._operands(hidden), attention_mask, **plain)
        own = self.hyperparameters()
        how: Any = {"activation": own["activation"], "softcap": self.softcap, "threshold": None}

        def weights_at(scale: Tensor) -> Any:
            return splade_activation(scale * logits, None, gate, return_logits=False, **how)

        scale = measured_scale(weights_at, logits)
        if values_can_be_checked(scale) and scale.isnan():  # measure the next batch
            self.measured_scale.fill_(torch.nan)
            self.awaits_scale = True
            return
        if values_can_be_checked(scale) and scale == 1.0:
            warnings.warn(
                f"expected a scale at which texts have a dot product of {SELF_DOT:g} with "
                "themselves, got none: it stays 1",
                stacklevel=2,
            )
        scale = scale.nan_to_num(1.0)
        if self._can_fold():
            multiply(self._folds_into, scale)
        else:
            self.measured_scale.copy_(scale)

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return states, weight and bias, whose product are the logits."""
        hidden, bias = hidden if self.transform is None else self.transform(hidden), self.bias
        scales: list[Any] = [self.logit_scale] if self.logit_scale != 1.0 else []
        if self.measured_scale is not None and not self.awaits_scale:
            scales.append(self.measured_scale)
        for scale in scales:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return hidden, self._linear[0].weight if self._linear else self.weight, bias

    @classmethod
    def from_masked_lm(cls, model: nn.Module, **options: Any) -> "SpladeHead":
        """Return the head of a language model of ``transformers``, with shared parameters.

        ``head(hidden, attention_mask)``, with ``hidden`` the last hidden state of
        ``model.base_model``, equals ``splade_pool(logits, attention_mask)`` of the model's logits.
        The model runs once on eight tokens, and is not changed. Create the head after
        ``resize_token_embeddings``, which replaces the matrix, and after PEFT has wrapped it.

        Args:
            model: a masked or causal language model whose layers between hidden states and logits
                are a chain that ends in a linear map, with or without LoRA adapters.
            **options: ``activation``, ``threshold``, ``layout``, ``sparse_grad`` and ``impl``.

        Raises:
            TypeError: if the model is no language model, or has other layers or adapters.
        """
        found = head_of(model)
        options |= {"transform": found.transform, "softcap": found.softcap}
        options["logit_scale"] = found.logit_scale
        head = cls(found.linear.weight, found.linear.bias, **options)
        layers: Any = found.transform or ()
        head._linear = found.linear, len(found.linear.weight)
        head._places = tuple(
            (owner, name, layer)
            for owner in unwrapped(model).modules()
            for name, layer in owner.named_children()
            if any(layer is x for x in layers)
        )
        return head

    def follow(self, model: Any, again: str) -> None:
        """Take the model's projection; raise unless it has the layers ``from_masked_lm`` found."""
        layer, (linear, size) = projection_of(model), self._linear
        places = all(getattr(owner, name) is layer for owner, name, layer in self._places)
        if not places or layer != linear or len(layer.weight) != size:
            raise RuntimeError(
                f"expected the layers that the head was made of, got others: {again} after "
                "resizing embeddings, and after adding or removing adapters in them"
            )
        if layer.weight is not self.weight or layer.bias is not self.bias:
            self.weight, self.bias = layer.weight, layer.bias  # FSDP2 has others within a step

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        *,
        gate: Tensor | None = None,
        return_logits: bool = False,
        layout: torch.layout | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the activations; tensors and ``layout`` are those of the function."""
        if self.awaits_scale and self.training and not is_exported():
            self._measure(hidden, attention_mask, gate)
        hidden, weight, bias = self._operands(hidden)
        own = {"layout": layout, "gate": gate, "return_logits": return_logits}
        options = self.hyperparameters(**own)
        threshold = self.threshold
        if not self.keep_at_least or not isinstance(threshold, float):
            return splade_head(hidden, weight, bias, attention_mask, **options)
        if options["layout"] != torch.strided:
            raise ValueError(
                f"expected dense vectors to prune, got layout={options['layout']}: calibrate with "
                "keep_at_least=0"
            )
        output = splade_head(hidden, weight, bias, attention_mask, **options | {"threshold": None})
        whole, logits = output if isinstance(output, tuple) else (output, None)
        options = {"activation": self.activation}
        kept = pruned_weights(whole, threshold, self.keep_at_least, **options)
        return kept if logits is None else (kept, logits)
