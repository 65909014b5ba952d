"""Derives a network's layers from two recordings of it, with batches of two sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.workloads.workload import Layer
from hpctrain.worker.tracing import operators
from hpctrain.worker.tracing.recorder import Access, Allocation, Operator, OpTrace

# The numbers from here on belong to autograd nodes that accumulate gradients, which have no number of their own.
_UNNUMBERED = 1 << 63
_NARROW_BYTES, _WIDE_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A quantity of a layer as a line over the batch, in bytes or FLOPs."""

    per_sample: int
    fixed: int


class _Passes:
    """One recording, with the layer of each of its operators."""

    def __init__(self, recording: OpTrace, starts: Sequence[int]) -> None:
        self.recording = recording
        self.starts = starts
        self._nodes = [recording.operators[start].node for start in starts]
        self.layer: list[int] = []
        for number, operator in enumerate(recording.operators):
            self.layer.append(self._layer(number, operator))

    def _layer(self, number: int, operator: Operator) -> int:
        if not operator.backward:
            return max(0, bisect_right(self.starts, number) - 1)
        return self.layer[-1] if operator.node >= _UNNUMBERED else self.of_node(operator.node)

    def of_node(self, node: int) -> int:
        """The layer of an autograd node."""
        return max(0, bisect_right(self._nodes, node) - 1)


def layers(first: OpTrace, second: OpTrace, *, batches: tuple[int, int], item_bytes: int) -> tuple[Layer, ...]:
    """The layers that both recordings show, the first with ``batches[0]`` samples, the second with ``batches[1]``.

    Args:
        item_bytes: the size of an element of the weights.

    Raises:
        HpctrainError: the network ran different operators with the two batches.
    """
    functions = [[each.function for each in recording.operators] for recording in (first, second)]
    if functions[0] != functions[1]:
        raise HpctrainError(
            "HT-trace-not-possible",
            "the network ran {operators} operators with {samples} samples and {other_operators} with "
            "{other_samples}, or others: what it does depends on its input",
            "trace a network, or a part of it, that does the same for each batch",
            operators=len(functions[0]),
            samples=batches[0],
            other_operators=len(functions[1]),
            other_samples=batches[1],
        )
    starts = _starts(first, second)
    passes = [_Passes(recording, starts) for recording in (first, second)]
    found = [_quantities(each) for each in passes]
    _require_linear(found, batches)
    lines = _solve(found, batches)
    _add_memory(lines, passes, batches)
    wide = _wide(first)
    return tuple(_layer(passes[0], index, line, item_bytes, wide) for index, line in enumerate(lines))


def _require_linear(both: list[list[dict[str, int]]], batches: tuple[int, int]) -> None:
    """Refuse a step that compares each sample with the others: twice the samples are then more than twice the work."""
    one, other = (sum(own.get(key, 0) for own in found for key in ("flops", "backward_flops")) for found in both)
    if other * batches[0] > one * batches[1] and batches[0]:
        raise HpctrainError(
            "HT-trace-not-possible",
            "{samples} samples take {factor:.3g} times as many FLOPs as {fewer}: the step compares "
            "samples with each other",
            "trace the network without that part of its loss",
            samples=batches[1],
            factor=other / one,
            fewer=batches[0],
        )


def _starts(first: OpTrace, second: OpTrace) -> list[int]:
    """The numbers of the forward operators with which layers begin: those whose traffic grows with the batch."""
    starts: list[int] = []
    node = -1
    for number, (one, other) in enumerate(zip(first.operators, second.operators, strict=True)):
        grows = _traffic(other) > _traffic(one)
        if not one.backward and grows and (not starts or one.node != node):
            starts.append(number)
            node = one.node
    return starts or [0]


def _traffic(operator: Operator) -> int:
    return sum(each.nbytes for each in (*operator.reads, *operator.writes))


def _quantities(passes: _Passes) -> list[dict[str, int]]:
    """What each layer's operators do together, by name, in bytes and FLOPs."""
    recording = passes.recording
    found: list[dict[str, int]] = [{} for _ in passes.starts]
    saved = {memory.number for _, memory in recording.saved}
    all_operators = recording.operators
    middle = next((number for number, each in enumerate(all_operators) if each.backward), len(all_operators))
    fused = _fused_bytes(all_operators[:middle], 0, saved) + _fused_bytes(all_operators[middle:], middle, set())
    for number, operator in enumerate(all_operators):
        own = found[passes.layer[number]]
        prefix = "backward_" if operator.backward else ""
        _add(own, f"{prefix}flops", operator.flops)
        _add(own, f"{prefix}elements", _traffic(operator))
        _add(own, f"fused_{prefix}elements", fused[number])
        _add(own, f"{prefix}operators", int(bool(operator.reads or operator.writes)))
    _add_saved(found, passes)
    return found


def _fused_bytes(operators: Sequence[Operator], first: int, saved: set[int]) -> list[int]:
    """The bytes that each operator of one pass still reads and writes if elementwise operators are fused.

    An elementwise operator joins the last operator that made one of its inputs, and joined operators are a chain. A
    chain reads each memory from outside once. It writes what it makes only if an operator outside of it reads that, the
    backward pass needs it, or it outlives the pass.

    Args:
        operators: those of the forward or of the backward pass, in order.
        first: the number of the first of them in the recording.
        saved: the numbers of the memories that are kept for the backward pass.
    """
    chains = _chains(operators)
    readers: dict[int, set[int]] = {}
    made: dict[int, int] = {}
    outside: list[list[Access]] = []
    for chain, operator in zip(chains, operators, strict=True):
        outside.append([each for each in operator.reads if made.get(each.memory.number) != chain])
        for each in operator.reads:
            if each.memory.number in made:
                readers.setdefault(each.memory.number, set()).add(chain)
        made |= {each.memory.number: chain for each in operator.writes}
    end = first + len(operators)
    seen: set[tuple[int, int, bool]] = set()
    found = []
    for chain, operator, reads in zip(chains, operators, outside, strict=True):
        total = 0
        for access, writing in [*((each, False) for each in reads), *((each, True) for each in operator.writes)]:
            number = access.memory.number
            needed = (
                not writing or number in saved or _outlives(access.memory, end) or readers.get(number, set()) - {chain}
            )
            if needed and (chain, number, writing) not in seen:
                seen.add((chain, number, writing))
                total += access.nbytes
        found.append(total)
    return found


def _chains(operators: Sequence[Operator]) -> list[int]:
    """The chain of each operator, named by the index of its first operator."""
    chains: list[int] = []
    maker: dict[int, int] = {}
    for index, operator in enumerate(operators):
        makers = [maker[each.memory.number] for each in operator.reads if each.memory.number in maker]
        chains.append(chains[max(makers)] if operator.pointwise and makers else index)
        maker |= {each.memory.number: index for each in operator.writes}
    return chains


def _outlives(memory: Allocation, end: int) -> bool:
    return not memory.own or memory.freed is None or memory.freed > end


def _add_saved(found: list[dict[str, int]], passes: _Passes) -> None:
    """Add what is kept for the backward pass: each memory once, under autocast once in each type."""
    wide = _wide(passes.recording)
    by_node = {each.node: each for each in passes.recording.operators if not each.backward and _traffic(each)}
    seen: set[tuple[int, int]] = set()
    for node, memory in passes.recording.saved:
        own = found[passes.of_node(node)]
        if memory.own and (memory.number, 0) not in seen:
            seen.add((memory.number, 0))
            _add(own, "saved_elements" if memory.floating else "saved_bytes", memory.nbytes)
        saver = by_node.get(node)
        multiplied = saver is not None and operators.kind(saver.function) != "other"
        # What autocast widens for an operator is a copy, and that is kept.
        widened = memory.number in wide or (saver is not None and saver.function in operators.WIDE)
        size = _WIDE_BYTES if widened and not multiplied else _NARROW_BYTES
        # Samples are in memory anyway, but autocast keeps a narrow copy of those that it multiplies.
        kept = memory.own or (multiplied and memory.number in passes.recording.samples)
        if kept and memory.floating and (memory.number, size) not in seen:
            seen.add((memory.number, size))
            _add(own, "mixed_saved_bytes", memory.nbytes * size)


def _wide(recording: OpTrace) -> set[int]:
    """The memories that hold float32 under bf16 autocast on a GPU, by its rules; weights and samples are among them."""
    wide = {memory.number for memory in recording.memories if not memory.own}
    for operator in recording.operators:
        if operator.backward:
            break
        activations = [each.memory for each in operator.reads if each.memory.own and each.memory.floating]
        inputs = [each.memory for each in operator.reads if each.memory.floating]
        if operator.function in operators.NORMALISATIONS and activations:
            inputs = [memory for memory in activations if memory.nbytes == max(each.nbytes for each in activations)]
        multiplied = operators.kind(operator.function) != "other"
        promoted = any(memory.number in wide for memory in inputs)
        if not multiplied and (promoted or operator.function in operators.WIDE):
            wide |= {each.memory.number for each in operator.writes}
    return wide


def _solve(both: list[list[dict[str, int]]], batches: tuple[int, int]) -> list[dict[str, Solved]]:
    names = {name for own in both[0] + both[1] for name in own}
    return [
        {name: _line(one.get(name, 0), other.get(name, 0), batches) for name in names}
        for one, other in zip(*both, strict=True)
    ]


def _line(one: int, other: int, batches: tuple[int, int]) -> Solved:
    per_sample = max(0, -(-(other - one) // (batches[1] - batches[0])))
    return Solved(per_sample=per_sample, fixed=max(0, one - batches[0] * per_sample))


def _add_memory(lines: list[dict[str, Solved]], passes: list[_Passes], batches: tuple[int, int]) -> None:
    """Add what is in memory while the passes are at each layer, beyond what is kept."""
    kept, total = [], 0
    for line in lines:
        total += sum(line[name].per_sample for name in ("saved_elements", "saved_bytes") if name in line)
        kept.append(total)
    live = [_live(each) for each in passes]
    nothing = Solved(per_sample=0, fixed=0)
    for number, operator in enumerate(passes[0].recording.operators):
        index = passes[0].layer[number]
        at = _line(live[0][number], live[1][number], batches)
        name = "transient_backward_elements" if operator.backward else "transient_elements"
        known = lines[index].get(name, nothing)
        beyond = max(known.per_sample, at.per_sample - kept[index])
        lines[index][name] = Solved(per_sample=beyond, fixed=max(known.fixed, at.fixed))


def _live(passes: _Passes) -> list[int]:
    """For each operator, the bytes in memory while it runs that are neither weights nor complete gradients."""
    count = len(passes.recording.operators)
    complete = _complete(passes)
    change = [0] * (count + 1)
    for memory in passes.recording.memories:
        end = min(complete.get(memory.number, count), count if memory.freed is None else memory.freed)
        if memory.own and memory.born < end:
            change[memory.born] += memory.nbytes
            change[end] -= memory.nbytes
    live, now = [], 0
    for each in change[:count]:
        now += each
        live.append(now)
    return live


def _complete(passes: _Passes) -> dict[int, int]:
    """For each memory of a gradient, the number of the operator from which on the gradient is complete."""
    recording, found = passes.recording, {}
    for name, memory in recording.gradients.items():
        layer = parameter_layer(passes, name)
        backward = (n for n in range(memory.born, len(recording.operators)) if passes.layer[n] <= layer)
        found[memory.number] = next(backward, len(recording.operators))
    return found


def parameter_layer(passes: _Passes, name: str) -> int:
    """The layer that uses a parameter first, in whose backward pass its gradient becomes complete."""
    use = passes.recording.uses.get(name)
    return 0 if use is None else passes.layer[use]


def _layer(passes: _Passes, index: int, line: dict[str, Solved], item_bytes: int, wide: set[int]) -> Layer:
    recording = passes.recording
    start = recording.operators[passes.starts[index]]
    members = [each for n, each in enumerate(recording.operators) if passes.layer[n] == index and not each.backward]
    kinds = [operators.kind(each.function) for each in members]
    own = [
        (place, elements)
        for place, (name, elements) in enumerate(recording.parameters.items())
        if parameter_layer(passes, name) == index
    ]

    def per_sample(name: str, unit: int = item_bytes) -> int:
        return -(-line[name].per_sample // unit) if name in line else 0

    def fixed(*names: str) -> int:
        return max((-(-line[name].fixed // item_bytes) for name in names if name in line), default=0)

    written = [each.memory.number for each in start.writes]
    return Layer(
        name=":".join(filter(None, (start.module, _title(start.function)))),
        kind="conv" if "conv" in kinds else "matmul" if "matmul" in kinds else "other",
        flops=per_sample("flops", 1),
        backward_flops=per_sample("backward_flops", 1),
        elements=per_sample("elements"),
        backward_elements=per_sample("backward_elements"),
        fused_elements=per_sample("fused_elements"),
        fused_backward_elements=per_sample("fused_backward_elements"),
        fixed_elements=fixed("elements"),
        fixed_backward_elements=fixed("backward_elements"),
        operators=line["operators"].fixed if "operators" in line else 0,
        backward_operators=line["backward_operators"].fixed if "backward_operators" in line else 0,
        parameters=tuple(elements for _, elements in own),
        places=tuple(place for place, _ in own),
        saved_elements=per_sample("saved_elements"),
        saved_bytes=per_sample("saved_bytes", 1),
        mixed_saved_bytes=per_sample("mixed_saved_bytes"),
        narrow=bool(written) and written[0] not in wide,
        transient_elements=per_sample("transient_elements"),
        transient_backward_elements=per_sample("transient_backward_elements"),
        fixed_transient_elements=fixed("transient_elements", "transient_backward_elements"),
    )


def _title(packet: Any) -> str:
    name = str(packet).rpartition(".")[2]
    return "attention" if "scaled_dot_product" in name else name.removeprefix("_")


def _add(found: dict[str, int], name: str, value: int) -> None:
    if value:
        found[name] = found.get(name, 0) + value
