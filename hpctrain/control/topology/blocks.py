"""The leaves of a fabric as Slurm's blocks, and the block sizes for Slurm.

A block has the hosts of a leaf, or of a set of leaves with one per rail. Slurm joins neighbouring blocks to larger
ones, as many as the ratio of a size to the first, always a power of two. It refuses to start if a block has fewer hosts
than the first size (https://slurm.schedmd.com/topology.conf.html).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.common.errors import counted
from hpctrain.control.topology.fabric import Fabric
from hpctrain.control.topology.subtrees import Subtree, subtrees


def blocks(fabric: Fabric) -> list[Subtree]:
    """The blocks, with neighbours side by side.

    A host that lost an adapter is in the block of the hosts that share its remaining leaves.
    """
    return [end for tree in _trees(fabric) for end in tree.walk() if end.hosts]


def positions(fabric: Fabric) -> list[Subtree | None]:
    """The blocks in the positions that make them neighbours, None for a position without a block.

    Where a file stated larger blocks, some of them may have fewer blocks than others: Slurm counts its larger blocks by
    the position, and a block without hosts keeps one (``topology/block/block_record.c`` of Slurm 25.05 and later).
    """
    ratios = [size // fabric.block_sizes[0] for size in fabric.block_sizes]
    found = [block for tree in _trees(fabric) for block in _padded(tree, ratios)]
    while found[-1] is None:
        found.pop()
    return found


def _padded(tree: Subtree, ratios: Sequence[int]) -> list[Subtree | None]:
    if tree.hosts:
        return [tree]
    found = [block for each in tree.below for block in _padded(each, ratios)]
    # The blocks of level 1 have the first size, those of each further level the next one.
    wanted = ratios[tree.level - 1] if tree.level <= len(ratios) else 0
    return found + [None] * (wanted - len(found))


def block_sizes(fabric: Fabric) -> list[int]:
    """The hosts of a block, then of each larger block that the fabric has.

    Sizes stated in a file are kept unless a block has fewer hosts. Otherwise the first size is that of the smallest
    block, and each level whose subtrees all have the same power of two of blocks, except perhaps the last, adds one.
    """
    trees = _trees(fabric)
    smallest = min(len(end.hosts) for tree in trees for end in tree.walk() if end.hosts)
    if fabric.block_sizes:
        first = min(fabric.block_sizes[0], smallest)
        return [first * (size // fabric.block_sizes[0]) for size in fabric.block_sizes]
    ratios = [1]
    for level in range(2, int(fabric.level.max())):
        counts = [_count(tree) for top in trees for tree in _up_to(top, level)]
        most = counts[0]
        even = all(count == most for count in counts[:-1]) and counts[-1] <= most
        if even and len(counts) > 1 and most > ratios[-1] and most & (most - 1) == 0:
            ratios.append(most)
    return [smallest * ratio for ratio in ratios]


def uneven(fabric: Fabric) -> list[str]:
    """A warning if one small block makes Slurm plan with fewer hosts than most blocks have."""
    counts = Counter(len(block.hosts) for block in blocks(fabric))
    usual = max(counts, key=lambda count: (counts[count], count))
    first = block_sizes(fabric)[0]
    if first >= usual or fabric.block_sizes[:1] == (first,):
        return []
    small = [fabric.hosts[block.hosts[0]] for block in blocks(fabric) if len(block.hosts) < usual]
    return [
        f"BlockSizes begins with {first}, the hosts of the smallest block, although most blocks have {usual}; blocks "
        + counted("with fewer, each by its first host", small)
    ]


def _trees(fabric: Fabric) -> list[Subtree]:
    """The fabric's trees with the hosts of each block in one subtree, those of many blocks first."""
    trees = subtrees(fabric)
    ends = [end for tree in trees for end in tree.walk() if end.hosts]
    joined: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for end in ends:
        joined[_block_of(end, ends).switches or end.hosts] += end.hosts
    return _in_order(tree for top in trees for tree in _merged(top, joined))


def _block_of(end: Subtree, ends: Sequence[Subtree]) -> Subtree:
    """The largest set of leaves that contains those of ``end``; of several, the one with most hosts."""
    wider = (each for each in ends if set(each.switches) >= set(end.switches) and end.switches)
    return max(wider, key=lambda each: (len(each.switches), len(each.hosts)), default=end)


def _merged(tree: Subtree, joined: dict[tuple[int, ...], list[int]]) -> Iterator[Subtree]:
    """The subtree with its blocks; nothing if all of its hosts are in blocks of other subtrees."""
    if tree.hosts:
        hosts = joined.get(tree.switches or tree.hosts, [])
        if hosts:
            yield replace(tree, hosts=tuple(sorted(hosts)))
    elif below := _in_order(each for child in tree.below for each in _merged(child, joined)):
        yield replace(tree, below=tuple(below))


def _in_order(trees: Iterator[Subtree]) -> list[Subtree]:
    """The trees with many blocks first: Slurm fills larger blocks in order, so that only the last may lack some."""
    return sorted(trees, key=lambda tree: -_count(tree))


def _count(tree: Subtree) -> int:
    return sum(bool(each.hosts) for each in tree.walk())


def _up_to(tree: Subtree, level: int) -> Iterator[Subtree]:
    """The largest subtrees up to a level."""
    if tree.level <= level:
        yield tree
    else:
        for each in tree.below:
            yield from _up_to(each, level)
