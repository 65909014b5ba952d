"""What a chain of operators moves if elementwise ones are one with the operator before them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.worker.tracing.recorder import Access, Memory, Operator


def fused_bytes(operators: Sequence[Operator], first: int, saved: set[int]) -> list[int]:
    """For each operator of one pass, the bytes that it still reads and writes.

    An elementwise operator joins the last one that made one of its inputs, and those that have joined are a chain. A
    chain reads a memory from outside once. What it makes it writes where an operator outside of it reads it, the
    backward pass needs it, or it is there after the pass.

    Args:
        operators: of the forward or of the backward pass, in order.
        first: the number of the first of them in the recording.
        saved: numbers of the memories that are kept for the backward pass.
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
    """The chain of each operator, by the number of its first one."""
    chains: list[int] = []
    maker: dict[int, int] = {}
    for index, operator in enumerate(operators):
        makers = [maker[each.memory.number] for each in operator.reads if each.memory.number in maker]
        chains.append(chains[max(makers)] if operator.pointwise and makers else index)
        maker |= {each.memory.number: index for each in operator.writes}
    return chains


def _outlives(memory: Memory, end: int) -> bool:
    return not memory.own or memory.freed is None or memory.freed > end
