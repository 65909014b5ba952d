"""Records one forward and backward pass: its operators, what they read and write, and what is kept in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.worker.tracing.operators import POINTWISE, flops, is_creation, is_lookup


@dataclass(kw_only=True)
class Allocation:
    """A memory that one or more tensors share.

    Attributes:
        nbytes: the size of all of it.
        shape: the shape of the first tensor seen in it.
        floating: whether it holds floating point numbers.
        own: whether it was allocated during the recording, so that it holds neither weights nor samples.
        born: the number of the operator that allocated it.
        freed: the number of the operator before which it was freed; None if it was alive at the end.
    """

    number: int
    nbytes: int
    shape: tuple[int, ...]
    floating: bool
    own: bool
    born: int
    freed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Access:
    """How many bytes of a memory an operator reads or writes."""

    memory: Allocation
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator that ran; if it only makes another view of a memory, it reads and writes nothing.

    Attributes:
        function: its ``OpOverloadPacket``, as in ``torch.ops.aten.mm``.
        module: the name of the module that called it in the forward pass.
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
        samples: the numbers of the batch's memories.
        memories: all that operators read or wrote, in the order in which they were first seen.
        uses: for each parameter the number of the first operator that read it.
        parameters: the number of elements of each parameter that requires a gradient, in the order of registration.
        gradients: for each parameter the memory that holds its gradient at the end.
        outputs: how many elements the model returned.
    """

    operators: list[Operator] = field(default_factory=list)
    saved: list[tuple[int, Allocation]] = field(default_factory=list)
    samples: frozenset[int] = frozenset()
    memories: list[Allocation] = field(default_factory=list)
    uses: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Allocation] = field(default_factory=dict)
    outputs: int = 0


class Recorder(TorchDispatchMode):
    """A mode in which operators are recorded.

    Args:
        model: the network, for the names of its modules and parameters.
        batch: its input.
    """

    def __init__(self, model: torch.nn.Module, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = OpTrace()
        self._known: dict[int, Allocation] = {}
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self._calls: list[str] = []
        self._ended = False
        self._parameters = {
            self._memory(parameter, own=False).number: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.recording.parameters = {
            name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        for tensor in (*model.buffers(), *model.parameters()):
            self._memory(tensor, own=False)
        given = [self._memory(each, own=False).number for each in tree_leaves(batch) if _is_tensor(each)]
        self.recording.samples = frozenset(given)

    @contextmanager
    def watching(self, *, within_model: bool = False) -> Iterator[None]:
        """Record what runs within the block; at its end, look up the gradients of the model's parameters.

        Args:
            within_model: whether the model's forward pass has already begun.
        """
        self._calls = [""] if within_model else []
        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._entered),
            torch.nn.modules.module.register_module_forward_hook(self._left, always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, _identity), self:
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
        inputs = [self._access(each, own=False) for each in tree_leaves((args, kwargs)) if _is_tensor(each)]
        out = func(*args, **kwargs)
        outputs = [self._access(each) for each in tree_leaves(out) if _is_tensor(each)]
        self._append(func, args, kwargs, out, inputs, outputs)
        return out

    def _append(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Access], outputs: list[Access]) -> None:
        node = torch._C._current_autograd_node()
        backward = node is not None
        packet = func._overloadpacket
        there = {access.memory.number for access in inputs}
        number = len(self.recording.operators)
        view = bool(outputs) and not func._schema.is_mutable and all(each.memory.number in there for each in outputs)
        if not (backward or view):
            for each in there & self._parameters.keys():
                self.recording.uses.setdefault(self._parameters[each], number)
        created = is_creation(packet)
        if is_lookup(packet):
            inputs = [replace(inputs[0], nbytes=min(inputs[0].nbytes, outputs[0].nbytes)), *inputs[1:]]
        reads = () if view or created else _once(inputs)
        writes = () if view or created == "uninitialised" else _once(outputs)
        self.recording.operators.append(
            Operator(
                function=packet,
                module=self._calls[-1] if self._calls else "loss",
                node=node._sequence_nr() if node is not None else torch._C._autograd._get_sequence_nr() - 1,
                backward=backward,
                pointwise=torch.Tag.pointwise in func.tags or packet in POINTWISE,
                flops=flops(packet, args, kwargs, out),
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
                number=len(self.recording.memories),
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
            self.recording.outputs += sum(each.numel() for each in tree_leaves(out) if _is_tensor(each))


def _once(accesses: list[Access]) -> tuple[Access, ...]:
    """The largest of several accesses to one memory."""
    found: dict[int, Access] = {}
    for each in accesses:
        known = found.setdefault(each.memory.number, each)
        if each.nbytes > known.nbytes:
            found[each.memory.number] = each
    return tuple(found.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
