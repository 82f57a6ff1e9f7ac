"""Gradient caching: the gradient of a large batch in the memory of a small one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparse_losses._core.checks import check_integer
from sparse_losses._core.precision import autocast_off
from sparse_losses.objective.batch import cat_padded
from sparse_losses.objective.objective import ObjectiveOutput

__all__ = ["cached_backward"]

Encoder = Callable[..., Any]
Inputs = Tensor | Mapping[str, Any]
Output = TypeVar("Output", Tensor, ObjectiveOutput)
_GeneratorStates = list[tuple[Callable[[Any], None], Any]]


def cached_backward(
    encoder: Encoder | Sequence[Encoder],
    columns: Sequence[Inputs | Sequence[Inputs]],
    loss: Callable[..., Output],
    *,
    mini_batch_size: int | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Output:
    r"""Encode, compute the loss and backpropagate with the graph of one mini-batch at a time.

    With representations $r = f_\theta(x)$ of the rows $x_1, \dots, x_B$

    $$\frac{\partial \mathcal{L}}{\partial \theta} = \sum_i
    \frac{\partial \mathcal{L}(r_1, \dots, r_B)}{\partial r_i} \,
    \frac{\partial f_\theta(x_i)}{\partial \theta}$$

    First, the mini-batches are encoded without a graph. Then the loss is computed once over all
    rows and differentiated with respect to the representations. Last, every mini-batch is encoded
    again with a graph, through which its gradients flow on. Dropout draws the same numbers both
    times; PyTorch's generators end in the state that one pass would have left. Gradients, those of
    the loss's own parameters too, add up in ``.grad``. An encoder with a ``no_sync()``, such as
    ``DistributedDataParallel``, reduces its gradients once, after its last mini-batch.

    Args:
        encoder: One encoder for all columns, or a list with one for each. It is called as
            ``encoder(inputs)`` or, where the column is a mapping, ``encoder(**inputs)``. It returns
            a tensor, or (named) tuples, lists and dicts of tensors and ``None``; each tensor has
            one row per row of the inputs.
        columns: The inputs to encode: anchors, positives, ... A column is a tensor or a mapping
            of tensors, split along dimension 0 (other values of a mapping are passed unchanged), or
            a list of such mini-batches, which may be padded to different lengths.
        loss: Called with the representations of each column, as one call of ``encoder`` would
            have returned them. Integer and boolean tensors carry no gradient; where their lengths
            differ they are padded with zeros on the right. Returns a 0-d tensor or an
            ``ObjectiveOutput``.
        mini_batch_size: Rows encoded at once; the last mini-batch may have fewer. Not needed where
            all columns are lists.
        backward: Called with the total: ``lambda total: scaler.scale(total).backward()`` with a
            ``GradScaler``, ``lambda total: (total / 4).backward()`` where four calls make one step.

    Returns:
        The output of ``loss``, without its graph.

    Raises:
        TypeError: for columns, outputs or losses of other types, or a loss that is not one number.
        ValueError: for columns whose tensors differ in their number of rows, or representations
            without a gradient.

    Examples:
        >>> import torch
        >>> from sparse_losses import InfoNCELoss
        >>> from sparse_losses.functional import cached_backward
        >>> encoder = torch.nn.Linear(4, 16)
        >>> queries, documents = torch.randn(10, 4), torch.randn(10, 4)
        >>> value = cached_backward(
        ...     encoder, [queries, documents], InfoNCELoss(), mini_batch_size=3
        ... )
        >>> value.requires_grad, encoder.weight.grad.shape
        (False, torch.Size([16, 4]))

    References:
        Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup.
    """
    mini_batches = _split(encoder, columns, mini_batch_size)
    with torch.no_grad():
        encoded = [_encode(column) for column in mini_batches]
    # Autocast caches the weights that it casts. PyTorch 2.6 would reuse the copies of this pass,
    # which have no graph, in the next pass, and the weights would get no gradient.
    torch.clear_autocast_cache()

    output = loss(*(tree_unflatten(leaves, structure) for leaves, structure in encoded))
    total = _total(output)
    # A plain loop too calls backward() outside the autocast region.
    with autocast_off(total.device):
        backward(total)
    detached = total.detach()
    result = output._replace(total=detached) if isinstance(output, ObjectiveOutput) else detached
    for column, (leaves, _) in zip(mini_batches, encoded, strict=True):
        _deal_out_gradients(column, leaves)
    del output, total, encoded, leaves  # free memory: only the gradients are needed from here on

    pending = [batch for column in mini_batches for batch in column if batch.gradients]
    if not pending:
        raise ValueError("expected `loss` to depend on a representation, got no gradient of any")
    left = Counter(id(batch.encoder) for batch in pending)
    for batch in pending:
        left[id(batch.encoder)] -= 1
        no_sync = getattr(batch.encoder, "no_sync", nullcontext)
        with no_sync() if left[id(batch.encoder)] else nullcontext():
            batch.go_backward()
    return result


@dataclass
class _MiniBatch:
    """Some rows of a column, and the state that the second pass over them needs."""

    column: int
    encoder: Encoder
    inputs: Inputs
    rows: int
    generators: _GeneratorStates = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    def encode(self) -> tuple[list[Tensor | None], Any]:
        """Return the encoder's tensors as a list, and the structure that held them."""
        inputs = self.inputs
        output = self.encoder(**inputs) if isinstance(inputs, Mapping) else self.encoder(inputs)
        leaves, structure = tree_flatten(output)
        for leaf in leaves:
            if not isinstance(leaf, Tensor | None):
                raise TypeError(
                    f"expected `encoder` to return tensors and None for column {self.column}, got "
                    f"{type(leaf).__name__}"
                )
            if leaf is not None and leaf.shape[:1] != (self.rows,):
                raise ValueError(
                    f"expected `encoder` to return a row for each of {self.rows} rows of column "
                    f"{self.column}, got a tensor of shape {list(leaf.shape)}"
                )
        return leaves, structure

    def go_backward(self) -> None:
        """Encode again with a graph, backpropagate the gradients and free them."""
        after = _generator_states()
        _restore(self.generators)  # the same numbers are drawn again
        try:
            leaves, _ = self.encode()
        finally:
            _restore(after)
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(leaves, self.gradients, strict=True)
            if leaf is not None and gradient is not None and leaf.requires_grad
        ]
        if not pairs:
            raise ValueError(
                f"expected `encoder` to return tensors with a gradient for column {self.column}, "
                "got none: are all of its parameters frozen? Encode such a column yourself, under "
                "torch.no_grad(), and use it inside `loss`"
            )
        outputs, gradients = zip(*pairs, strict=True)
        with autocast_off(outputs[0].device):
            torch.autograd.backward(outputs, gradients)
        self.gradients.clear()


def _generator_states() -> _GeneratorStates:
    """Return the states of PyTorch's generators, each with the function that sets it."""
    states: _GeneratorStates = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        module = torch.get_device_module(device)
        # Reading the state would initialise a device that is not in use.
        if getattr(module, "is_initialized", lambda: True)():
            every = "_all" if hasattr(module, "get_rng_state_all") else ""
            state = getattr(module, f"get_rng_state{every}")()
            states.append((getattr(module, f"set_rng_state{every}"), state))
    return states


def _restore(states: _GeneratorStates) -> None:
    for set_state, state in states:
        set_state(state)


def _split(
    encoder: Encoder | Sequence[Encoder],
    columns: Sequence[Inputs | Sequence[Inputs]],
    size: int | None,
) -> list[list[_MiniBatch]]:
    """Return the mini-batches of each column, each with its encoder."""
    if size is not None:
        check_integer("mini_batch_size", size, minimum=1)
    if not isinstance(columns, (list, tuple)) or not columns:
        kind = type(columns).__name__
        raise TypeError(f"expected `columns` to be a list of at least one column, got a {kind}")
    encoders = encoder if isinstance(encoder, (list, tuple)) else [encoder] * len(columns)
    if len(encoders) != len(columns):
        raise ValueError(
            f"expected one encoder, or one for each of {len(columns)} columns, got {len(encoders)}"
        )
    split: list[list[_MiniBatch]] = []
    for i, (encode, column) in enumerate(zip(encoders, columns, strict=True)):
        parts = column if isinstance(column, (list, tuple)) else _slices(i, column, size)
        split.append([_MiniBatch(i, encode, inputs, _rows(i, inputs)) for inputs in parts])
    return split


def _slices(column: int, inputs: Any, size: int | None) -> list[Inputs]:
    rows = _rows(column, inputs)
    if size is None:
        raise ValueError(f"expected `mini_batch_size`, or a list as column {column}, got neither")
    parts = [slice(first, first + size) for first in range(0, max(rows, 1), size)]
    if isinstance(inputs, Tensor):
        return [inputs[part] for part in parts]
    return [
        {name: x[part] if isinstance(x, Tensor) else x for name, x in inputs.items()}
        for part in parts
    ]


def _rows(column: int, inputs: Any) -> int:
    """Return the number of rows of a tensor, or of all tensors of a mapping."""
    if not isinstance(inputs, (Tensor, Mapping)):
        kind = type(inputs).__name__
        raise TypeError(f"expected column {column} to be a tensor, mapping or list, got {kind}")
    named = inputs if isinstance(inputs, Mapping) else {"a tensor": inputs}
    shapes = {name: list(x.shape) for name, x in named.items() if isinstance(x, Tensor)}
    rows = [shape[:1] for shape in shapes.values()]
    if not rows or not rows[0] or rows.count(rows[0]) < len(rows):
        got = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items()) or "no tensor"
        raise ValueError(f"expected one number of rows in all of column {column}, got {got}")
    return rows[0][0]


def _encode(column: Sequence[_MiniBatch]) -> tuple[list[Tensor | None], Any]:
    """Return a column's representations, as leaves of the loss's graph, and their structure."""
    outputs = []
    for batch in column:
        batch.generators = _generator_states()
        leaves, structure = batch.encode()
        outputs.append(leaves)
    return [_join(leaves) for leaves in zip(*outputs, strict=True)], structure


def _join(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Concatenate one output of the encoder over all mini-batches."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if len(tensors) < len(parts):
        raise ValueError("expected `encoder` to return a tensor for all mini-batches, got None too")
    carries_gradient = tensors[0].is_floating_point()
    if not carries_gradient and tensors[0].ndim > 1:
        return cat_padded(*tensors)
    return torch.cat(tensors).detach().requires_grad_(carries_gradient)


def _deal_out_gradients(column: Sequence[_MiniBatch], leaves: Sequence[Tensor | None]) -> None:
    """Give each mini-batch its rows of the gradients."""
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    if all(gradient is None for gradient in gradients):
        return  # the loss ignores the column
    first = 0
    for batch in column:
        rows = slice(first, first + batch.rows)
        batch.gradients = [None if gradient is None else gradient[rows] for gradient in gradients]
        first += batch.rows


def _total(output: Tensor | ObjectiveOutput) -> Tensor:
    total = output.total if isinstance(output, ObjectiveOutput) else output
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        raise TypeError(
            "expected `loss` to return one number with a gradient, a 0-d tensor or an "
            f"ObjectiveOutput, got {output!r}"
        )
    return total
