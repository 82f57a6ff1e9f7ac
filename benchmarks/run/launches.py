"""The kernel launches of a call, counted on meta tensors.

A meta tensor has a shape, a dtype and no values: any size can be counted, and whatever would wait
for an accelerator to read a value raises here. An operation that PyTorch dispatches is one launch,
except views and fresh memory, which are none.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sparse_losses.fast import head

NO_LAUNCH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
NO_LAUNCH |= {"detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "resize_"}
# Operations of several kernels that are one operation to PyTorch's dispatcher.
SEVERAL = {"logsumexp": 9, "binary_cross_entropy_with_logits": 6, "mse_loss": 2}

# PyTorch's own counter lacks the product that is added in place.
FLOPS = {**flop_registry, torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}

# A custom operator hides what it launches; the function that it wraps does not.
WRAPPED: dict[Any, Callable[..., Any]] = {
    torch.ops.sparse_losses.head_logits.default: head._logits,
    torch.ops.sparse_losses.head_spread.default: head._spread,
}


class Operation(NamedTuple):
    """One operation on the device.

    Attributes:
        name: PyTorch's name, such as ``mm``.
        launches: number of kernels.
        bytes: read and written.
        flops: of a matrix product; else 0.
        dtype: of its first tensor: that of a product's operands.
    """

    name: str
    launches: int
    bytes: int
    flops: int
    dtype: torch.dtype


class Launches(TorchDispatchMode):
    """Record the operations on a device, forward and backward.

    Args:
        device: ``"meta"``, or ``"cpu"`` for what needs values.

    Attributes:
        operations: in the order of their launches.
        peak_bytes: maximal memory of tensors made meanwhile and still alive.
        largest: number of elements of the largest tensor made meanwhile.
        custom: names of our own operators that ran.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self.peak_bytes = self.largest = 0
        self.custom: set[str] = set()
        self._alive: dict[StorageWeakRef, int] = {}

    @property
    def count(self) -> int:
        """Return the number of launches."""
        return sum(each.launches for each in self.operations)

    @property
    def names(self) -> Counter[str]:
        """Return how often each operation was launched."""
        return Counter(each.name for each in self.operations)

    @property
    def flops(self) -> Counter[torch.dtype]:
        """Return the floating-point operations of products, by the dtype of their operands."""
        total: Counter[torch.dtype] = Counter()
        for each in self.operations:
            total[each.dtype] += each.flops
        return +total

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        with self:
            if function in WRAPPED:
                self.custom.add(function._overloadpacket.__name__)
                return WRAPPED[function](*args, **kwargs)
            outputs = function.decompose(*args, **kwargs)  # `matmul` is `mm` or `bmm`
            if outputs is not NotImplemented:
                return outputs
        outputs = function(*args, **kwargs)
        name = function._overloadpacket.__name__
        received, made = _tensors((args, kwargs)), _tensors(outputs)
        if made and not function.is_view and made[0].device.type == self.device:
            self._remember(received, made)
            if name not in NO_LAUNCH:
                count_flops = FLOPS.get(function._overloadpacket)
                plain = [x for x in args if not isinstance(x, torch.dtype)]  # an `out_dtype`
                flops = count_flops(*plain, **kwargs, out_val=outputs) if count_flops else 0
                size = _bytes(name, _tensors(args), made)
                # Of a product the operands', not the fp32 sum's that it is added to.
                dtype = min(received or made, key=lambda x: x.element_size() if flops else 0).dtype
                # Without a mean the squares are one kernel.
                count = 1 if name == "mse_loss" and made[0].ndim > 0 else SEVERAL.get(name, 1)
                self.operations.append(Operation(name, count, size, flops, dtype))
        return outputs

    def _remember(self, received: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        old = {StorageWeakRef(x.untyped_storage()) for x in received}
        for tensor in made:
            storage = tensor.untyped_storage()
            if (key := StorageWeakRef(storage)) not in old:
                self._alive[key] = storage.nbytes()
                self.largest = max(self.largest, tensor.numel())
        self._alive = {key: size for key, size in self._alive.items() if not key.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


def _tensors(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]


def _bytes(name: str, received: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes read and written; an expanded tensor is read from its smaller storage."""
    if name.startswith(("gather", "scatter")):  # only what the index names
        index = max(received[1:], key=lambda x: x.numel() * (not x.is_floating_point()))
        return index.nbytes + 2 * index.numel() * received[0].element_size()
    if name in ("fill_", "zero_", "copy_"):  # what was there is not read
        received = received[1:]
    read = {id(x): min(x.nbytes, x.untyped_storage().nbytes()) for x in received}
    return sum(read.values()) + sum(x.nbytes for x in made)


def training_launches(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Launches:
    """Count a call with its gradient; what it caches is made by a call before."""
    for _ in range(2):
        with Launches() as counted:
            outputs = _tensors(function(*args, **kwargs))
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
            del outputs
        for leaf in _tensors((args, kwargs)):
            leaf.grad = None
    return counted
