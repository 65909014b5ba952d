"""Derives a network's layers from one recording of it, in which each memory grows with the samples or does not."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.common.workloads.workload import Layer
from hpctrain.worker.tracing.recorder import NORMALISATIONS, WIDE, Access, Allocation, Operator, OpTrace, kind

# The numbers from here on belong to autograd nodes that accumulate gradients, which have no number of their own.
_UNNUMBERED = 1 << 63
_NARROW_BYTES, _WIDE_BYTES = 2, 4

# Bytes or FLOPs by name, those of all samples and those whatever their number.
_Sums = defaultdict[tuple[str, bool], int]


def layers(
    recording: OpTrace, *, samples: int, grows: Callable[[Allocation], bool], item_bytes: int
) -> tuple[Layer, ...]:
    """The layers of a network, in forward order.

    Args:
        grows: whether a memory would be larger with more samples; weights and their gradients are never.
        item_bytes: the size of an element of the weights.
    """
    found = _Layers(recording, samples, grows, item_bytes)
    found.add_operators()
    found.add_saved()
    found.add_transient()
    return tuple(found.layer_at(index) for index in range(len(found.starts)))


class _Layers:
    def __init__(self, recording: OpTrace, samples: int, grows: Callable[[Allocation], bool], item_bytes: int) -> None:
        self.recording, self.samples, self.item_bytes = recording, samples, item_bytes
        fixed = set(recording.gradients.values())
        self.growing = recording.samples | {
            memory for memory in recording.memories if memory.own and memory not in fixed and grows(memory)
        }
        self.wide = _wide(recording)
        self.starts = self._starts()
        self._nodes = [recording.operators[start].node for start in self.starts]
        self.layer: list[int] = []
        for number, operator in enumerate(recording.operators):
            self.layer.append(self._layer_of(number, operator))
        self.sums: list[_Sums] = [defaultdict(int) for _ in self.starts]

    # Which layer.

    def _starts(self) -> list[int]:
        """The numbers of the forward operators with which layers begin: those whose traffic grows with the samples."""
        starts: list[int] = []
        node = -1
        for number, operator in enumerate(self.recording.operators):
            moves = any(self._grows(access) for access in (*operator.reads, *operator.writes))
            if not operator.backward and moves and (not starts or operator.node != node):
                starts.append(number)
                node = operator.node
        return starts or [0]

    def _layer_of(self, number: int, operator: Operator) -> int:
        if not operator.backward:
            return max(0, bisect_right(self.starts, number) - 1)
        return self.layer[-1] if operator.node >= _UNNUMBERED else self._of_node(operator.node)

    def _of_node(self, node: int) -> int:
        return max(0, bisect_right(self._nodes, node) - 1)

    def _of_parameter(self, name: str) -> int:
        """The layer that uses a parameter first, in whose backward pass its gradient becomes complete."""
        use = self.recording.uses.get(name)
        return 0 if use is None else self.layer[use]

    def _grows(self, access: Access) -> bool:
        return (access.rows or access.memory) in self.growing

    # What each layer does and keeps.

    def add_operators(self) -> None:
        everything = self.recording.operators
        saved = {memory for _, memory in self.recording.saved}
        middle = next((n for n, operator in enumerate(everything) if operator.backward), len(everything))
        outside = _unfused(everything[:middle], middle, saved) + _unfused(everything[middle:], len(everything), set())
        for layer, operator, needed in zip(self.layer, everything, outside, strict=True):
            sums, prefix = self.sums[layer], "backward_" if operator.backward else ""
            accesses = (*operator.reads, *operator.writes)
            sums[f"{prefix}flops", True] += operator.flops if any(map(self._grows, accesses)) else 0
            sums[f"{prefix}operators", False] += bool(accesses)
            for name, those in ((f"{prefix}elements", accesses), (f"fused_{prefix}elements", needed)):
                for access in those:
                    sums[name, self._grows(access)] += access.nbytes

    def add_saved(self) -> None:
        """Add what is kept for the backward pass: each memory once, under autocast once in each type."""
        recording = self.recording
        savers = {each.node: each for each in recording.operators if not each.backward and (each.reads or each.writes)}
        seen: set[tuple[Allocation, int]] = set()
        for node, memory in recording.saved:
            sums, grows = self.sums[self._of_node(node)], memory in self.growing
            if memory.own and (memory, 0) not in seen:
                seen.add((memory, 0))
                sums["saved_elements" if memory.floating else "saved_bytes", grows] += memory.nbytes
            saver = savers.get(node)
            multiplied = saver is not None and kind(saver.function) != "other"
            # What autocast widens for an operator is a copy, and that is kept.
            widened = memory in self.wide or (saver is not None and saver.function in WIDE)
            size = _WIDE_BYTES if widened and not multiplied else _NARROW_BYTES
            # Samples are in memory anyway, but autocast keeps a narrow copy of those that it multiplies.
            kept = memory.own or (multiplied and memory in recording.samples)
            if kept and memory.floating and (memory, size) not in seen:
                seen.add((memory, size))
                sums["mixed_saved_bytes", grows] += memory.nbytes * size

    def add_transient(self) -> None:
        """Add what is in memory while the passes are at each layer, beyond what is kept."""
        kept, total = [], 0
        for sums in self.sums:
            total += sum(self._per_sample(sums, name) for name in ("saved_elements", "saved_bytes"))
            kept.append(total * self.samples)
        complete = self._complete()
        growing, fixed = (_live(self.recording, complete, which) for which in (self.growing, None))
        for number, operator in enumerate(self.recording.operators):
            index = self.layer[number]
            name = "transient_backward_elements" if operator.backward else "transient_elements"
            sums, beyond = self.sums[index], growing[number] - kept[index]
            sums[name, True] = max(sums[name, True], beyond)
            sums[name, False] = max(sums[name, False], fixed[number] - growing[number])

    def _complete(self) -> dict[Allocation, int]:
        """For each memory of a gradient, the number of the operator from which on the gradient is complete."""
        found, count = {}, len(self.recording.operators)
        for name, memory in self.recording.gradients.items():
            layer = self._of_parameter(name)
            backward = (number for number in range(memory.born, count) if self.layer[number] <= layer)
            found[memory] = next(backward, count)
        return found

    # The layer.

    def _per_sample(self, sums: _Sums, name: str) -> int:
        return -(-sums[name, True] // self.samples)

    def layer_at(self, index: int) -> Layer:
        recording, sums = self.recording, self.sums[index]
        start = recording.operators[self.starts[index]]
        title = str(start.function).rpartition(".")[2].removeprefix("_")
        title = "attention" if "scaled_dot_product" in title else title
        members = zip(recording.operators, self.layer, strict=True)
        kinds = {kind(each.function) for each, layer in members if layer == index and not each.backward}
        parameters = [
            (place, elements)
            for place, (name, elements) in enumerate(recording.parameters.items())
            if self._of_parameter(name) == index
        ]

        def elements(name: str, *, grows: bool = True) -> int:
            nbytes = self._per_sample(sums, name) if grows else sums[name, False]
            return -(-nbytes // self.item_bytes)

        scaled = ["elements", "backward_elements", "fused_elements", "fused_backward_elements", "saved_elements"]
        scaled += ["mixed_saved_bytes", "transient_elements", "transient_backward_elements"]
        quantities: dict[str, Any] = {name: elements(name) for name in scaled}
        quantities |= {name: self._per_sample(sums, name) for name in ("flops", "backward_flops", "saved_bytes")}
        quantities |= {name: sums[name, False] for name in ("operators", "backward_operators")}
        for name in ("elements", "backward_elements"):
            quantities[f"fixed_{name}"] = elements(name, grows=False)
        return Layer(
            name=":".join(filter(None, (start.module, title))),
            kind="conv" if "conv" in kinds else "matmul" if "matmul" in kinds else "other",
            **quantities,
            parameters=tuple(count for _, count in parameters),
            places=tuple(place for place, _ in parameters),
            narrow=bool(start.writes) and start.writes[0].memory not in self.wide,
            fixed_transient_elements=max(
                elements(name, grows=False) for name in ("transient_elements", "transient_backward_elements")
            ),
        )


def _unfused(operators: Sequence[Operator], end: int, saved: set[Allocation]) -> list[list[Access]]:
    """What each operator of one pass still reads and writes if elementwise operators are fused.

    An elementwise operator joins the last operator that made one of its inputs, and joined operators are a chain. A
    chain reads each memory from outside once. It writes what it makes only if an operator outside of it reads that, the
    backward pass needs it, or it outlives the pass.

    Args:
        operators: those of the forward or of the backward pass, in order.
        end: the number of the first operator behind the pass.
        saved: the memories that are kept for the backward pass.
    """
    chains = _chains(operators)
    readers: dict[Allocation, set[int]] = defaultdict(set)
    made: dict[Allocation, int] = {}
    outside: list[list[Access]] = []
    for chain, operator in zip(chains, operators, strict=True):
        outside.append([access for access in operator.reads if made.get(access.memory) != chain])
        for memory in {access.memory for access in operator.reads} & made.keys():
            readers[memory].add(chain)
        made |= {access.memory: chain for access in operator.writes}
    read: set[tuple[int, Allocation]] = set()
    written: set[tuple[int, Allocation]] = set()
    found = []
    for chain, operator, reads in zip(chains, operators, outside, strict=True):
        writes = [
            access
            for access in operator.writes
            if access.memory in saved
            or not access.memory.own
            or access.memory.freed is None
            or access.memory.freed > end
            or readers[access.memory] - {chain}
        ]
        found.append([*_first(chain, reads, read), *_first(chain, writes, written)])
    return found


def _first(chain: int, accesses: Sequence[Access], seen: set[tuple[int, Allocation]]) -> list[Access]:
    """The accesses to memories that a chain has not accessed before."""
    found = [access for access in accesses if (chain, access.memory) not in seen]
    seen |= {(chain, access.memory) for access in found}
    return found


def _chains(operators: Sequence[Operator]) -> list[int]:
    """The chain of each operator, named by the index of its first operator."""
    chains: list[int] = []
    maker: dict[Allocation, int] = {}
    for index, operator in enumerate(operators):
        makers = [maker[access.memory] for access in operator.reads if access.memory in maker]
        chains.append(chains[max(makers)] if operator.pointwise and makers else index)
        maker |= {access.memory: index for access in operator.writes}
    return chains


def _wide(recording: OpTrace) -> set[Allocation]:
    """The memories that hold float32 under bf16 autocast on a GPU, by its rules; weights and samples are among them."""
    wide = {memory for memory in recording.memories if not memory.own}
    for operator in recording.operators:
        if operator.backward:
            break
        inputs = [access.memory for access in operator.reads if access.memory.floating]
        activations = [memory for memory in inputs if memory.own]
        if operator.function in NORMALISATIONS and activations:
            inputs = [memory for memory in activations if memory.nbytes == max(each.nbytes for each in activations)]
        promoted = operator.function in WIDE or any(memory in wide for memory in inputs)
        if promoted and kind(operator.function) == "other":
            wide |= {access.memory for access in operator.writes}
    return wide


def _live(recording: OpTrace, complete: dict[Allocation, int], which: frozenset[Allocation] | None) -> list[int]:
    """For each operator, the bytes in memory while it runs that are neither weights nor complete gradients.

    Args:
        which: the memories that count; None for all.
    """
    count = len(recording.operators)
    change = [0] * (count + 1)
    for memory in recording.memories:
        end = min(complete.get(memory, count), count if memory.freed is None else memory.freed)
        if memory.own and memory.born < end and (which is None or memory in which):
            change[memory.born] += memory.nbytes
            change[end] -= memory.nbytes
    live, now = [], 0
    for nbytes in change[:count]:
        now += nbytes
        live.append(now)
    return live
