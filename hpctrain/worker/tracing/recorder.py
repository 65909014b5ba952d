"""Records one forward and backward pass: its operators, what they read and write, and what is kept in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

_CONVOLUTIONS = frozenset({aten.convolution, aten._convolution, aten.cudnn_convolution})
# Attention in one kernel on a CPU, which PyTorch's own FLOP counter leaves out.
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
# Elementwise operators that PyTorch does not tag as such.
_POINTWISE = frozenset(
    {aten.native_dropout, aten.native_dropout_backward, aten.copy_, aten.clone, aten._to_copy, aten.where}
    | {aten.masked_fill}
)
# These read nothing, and fill their memory or leave it as it is.
_CREATED = frozenset({aten.zeros, aten.ones, aten.full, aten.new_zeros, aten.new_ones, aten.new_full}) | frozenset(
    {aten.zeros_like, aten.ones_like, aten.full_like, aten.zero_, aten.fill_}
)
_UNINITIALISED = frozenset(
    {aten.empty, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_like, aten.empty_permuted}
)
# These read only the rows that they return.
_LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})
# Their float32 statistics are no reason to compute in float32, unlike what they normalise.
NORMALISATIONS = frozenset({aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm})
# CUDA operators that autocast to float32: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
_WIDE_NAMES = """
native_layer_norm native_group_norm _fused_rms_norm _softmax _log_softmax nll_loss_forward nll_loss2d_forward
binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss softplus
exp expm1 log log1p log2 log10 logsumexp acos asin cosh sinh tan erfinv pow prod sum cumsum cumprod reciprocal rsqrt
linalg_vector_norm norm upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
WIDE = frozenset(getattr(aten, name) for name in _WIDE_NAMES.split())


@dataclass(kw_only=True, eq=False)
class Allocation:
    """A memory that one or more tensors share.

    Attributes:
        shape: of the first tensor seen in it.
        floating: whether it holds floating point numbers.
        own: whether it was allocated during the recording, so that it holds neither weights nor samples.
        born: the number of the operator that allocated it.
        freed: the number of the operator before which it was freed; None if it was alive at the end.
    """

    nbytes: int
    shape: tuple[int, ...]
    floating: bool
    own: bool
    born: int
    freed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Access:
    """How many bytes of a memory an operator reads or writes.

    Attributes:
        rows: the memory that decides how many, where a lookup reads single rows of a table.
    """

    memory: Allocation
    nbytes: int
    rows: Allocation | None = None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator that ran; if it only makes another view of a memory, it reads and writes nothing.

    Attributes:
        function: its ``OpOverloadPacket``, as in ``torch.ops.aten.mm``, which a ``module`` called in the forward pass.
        node: the number of the autograd node that it made; in the backward pass, of the node that it belongs to.
        pointwise: whether each element of its output depends only on the elements at the same place.
        flops: those of a convolution, matrix product or attention; else 0.
    """

    function: Any
    module: str
    node: int
    backward: bool
    pointwise: bool
    flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


@dataclass(kw_only=True)
class OpTrace:
    """What a recorder has seen, in order.

    Attributes:
        saved: (number of the autograd node, memory) for each tensor that was kept for the backward pass.
        samples: the batch's, of all ``memories`` that operators read or wrote, in the order of their first use.
        uses: for each parameter the number of the first operator that read it.
        parameters: the number of elements of each parameter that requires a gradient, in the order of registration.
        gradients: for each parameter the memory that holds its gradient at the end.
        outputs: how many elements the model returned.
    """

    operators: list[Operator] = field(default_factory=list)
    saved: list[tuple[int, Allocation]] = field(default_factory=list)
    samples: frozenset[Allocation] = frozenset()
    memories: list[Allocation] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Allocation] = field(default_factory=dict)
    outputs: int = 0


class Recorder(TorchDispatchMode):
    """A mode in which the operators of a network are recorded, with the names of its modules and parameters."""

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = OpTrace()
        self._known: dict[int, Allocation] = {}
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._calls: list[str] = []
        self._ended = False
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._parameters = {self._memory(each, own=False): name for name, each in trained.items()}
        self.recording.parameters = {name: each.numel() for name, each in trained.items()}
        for tensor in (*model.buffers(), *model.parameters()):
            self._memory(tensor, own=False)
        self.recording.samples = frozenset(self._memory(each, own=False) for each in tensors_of(batch))

    @contextmanager
    def watching(self, *, within_model: bool = False) -> Iterator[None]:
        """Record what runs within the block, which may be within the model's forward pass, and its gradients."""
        self._calls = [""] if within_model else []
        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._entered),
            torch.nn.modules.module.register_module_forward_hook(self._left, always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, lambda tensor: tensor), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._ended = True
        self.recording.gradients = {
            name: self._memory(parameter.grad)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        # Looked up before the call: an operator that writes into its input returns that memory as its output.
        inputs = [self._access(each, own=False) for each in tensors_of((args, kwargs))]
        out = func(*args, **kwargs)
        outputs = [self._access(each) for each in tensors_of(out)]
        self._append(func, args, kwargs, out, inputs, outputs)
        return out

    def _append(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Access], outputs: list[Access]) -> None:
        node = torch._C._current_autograd_node()
        backward = node is not None
        packet = func._overloadpacket
        there = {access.memory for access in inputs}
        view = bool(outputs) and not func._schema.is_mutable and all(access.memory in there for access in outputs)
        if not (backward or view):
            for memory in there & self._parameters.keys():
                self.recording.uses.setdefault(self._parameters[memory], len(self.recording.operators))
        if packet in _LOOKUPS:
            inputs = [replace(inputs[0], nbytes=outputs[0].nbytes, rows=outputs[0].memory), *inputs[1:]]
        created = packet in _CREATED or packet in _UNINITIALISED
        reads = () if view or created else _once(inputs)
        writes = () if view or packet in _UNINITIALISED else _once(outputs)
        self.recording.operators.append(
            Operator(
                function=packet,
                module=self._calls[-1] if self._calls else "loss",
                node=node._sequence_nr() if node is not None else torch._C._autograd._get_sequence_nr() - 1,
                backward=backward,
                pointwise=torch.Tag.pointwise in func.tags or packet in _POINTWISE,
                flops=_flops(packet, args, kwargs, out),
                reads=reads,
                writes=writes,
            )
        )

    def _access(self, tensor: torch.Tensor, *, own: bool = True) -> Access:
        memory = self._memory(tensor, own=own)
        # An expanded tensor has more elements than its memory.
        return Access(memory=memory, nbytes=min(tensor.numel() * tensor.element_size(), memory.nbytes))

    def _memory(self, tensor: torch.Tensor, *, own: bool = True) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            memory = Allocation(
                nbytes=storage.nbytes(),
                shape=tuple(tensor.shape),
                floating=tensor.is_floating_point() or tensor.is_complex(),
                own=own,
                born=len(self.recording.operators),
            )
            self.recording.memories.append(memory)
            self._known[key] = memory
            weakref.finalize(storage, partial(self._freed, key)).atexit = False
        return self._known[key]

    def _freed(self, key: int) -> None:
        memory = self._known.pop(key)
        if not self._ended:
            memory.freed = len(self.recording.operators)

    def _packed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.recording.saved.append((torch._C._autograd._get_sequence_nr() - 1, self._memory(tensor)))
        return tensor

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        self._calls.append(self._modules.get(id(module), self._calls[-1] if self._calls else "loss"))

    def _left(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        self._calls.pop()
        if module is self._model:
            self.recording.outputs += sum(each.numel() for each in tensors_of(out))


def _once(accesses: list[Access]) -> tuple[Access, ...]:
    """The largest of several accesses to one memory."""
    found: dict[Allocation, Access] = {}
    for access in accesses:
        if access.nbytes > found.setdefault(access.memory, access).nbytes:
            found[access.memory] = access
    return tuple(found.values())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The FLOPs of a convolution, matrix product or attention by PyTorch's formulas, a multiply-add being 2; else 0."""
    if packet is _ATTENTION:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def kind(packet: Any) -> Literal["conv", "matmul", "other"]:
    """How a GPU's matrix units compute a forward operator."""
    if packet in _CONVOLUTIONS:
        return "conv"
    return "matmul" if packet is _ATTENTION or packet in flop_registry else "other"
