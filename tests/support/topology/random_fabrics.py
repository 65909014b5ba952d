"""Fabrics as they come: ragged, with several roots, flat, with hosts and spare switches where nobody expects them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Cables:
    """Cables of one fabric while it grows.

    Attributes:
        laid: (end, end) as of ``listings.listing``.
        level: of each switch, as it was built.
    """

    choose: random.Random
    rails: int
    laid: list[tuple[str, str]] = field(default_factory=list)
    level: dict[str, int] = field(default_factory=dict)
    hosts: int = 0

    def switches(self, level: int, count: int) -> list[str]:
        names = [f"s{len(self.level) + number}" for number in range(count)]
        # Names say nothing of the place in the tree.
        self.level |= dict.fromkeys(names, level)
        return names

    def leaf_set(self) -> list[str]:
        """A leaf a rail with hosts on all of them; one but the first may have lost its adapter on the last rail."""
        leaves = self.switches(1, self.rails)
        for number in range(self.choose.randint(1, 3)):
            lost = number and self.rails > 1 and self.choose.random() < 0.2
            here = leaves[:-1] if lost else leaves
            self.laid += [(f"h{self.hosts} m{rail}", leaf) for rail, leaf in enumerate(here)]
            self.hosts += 1
        return leaves

    def join(self, lower: list[str], upper: list[str], missing: float) -> None:
        """A cable of each to each, often several; of those to one switch below, all but one may be missing."""
        for below in lower:
            kept = self.choose.choice(upper)
            for above in upper:
                if above == kept or self.choose.random() >= missing:
                    self.laid += [(below, above)] * self.choose.choice([1, 1, 2])

    def tree(self, level: int, missing: float, *, root: bool = True) -> list[str]:
        """The switches on top of a tree whose deepest leaves are ``level`` - 1 below; others hang anywhere."""
        if level == 1:
            return self.leaf_set()
        # Two of the full height below the root, or another switch would be the middle.
        heights = [level - 1] * (2 if root else 1)
        heights += [self.choose.randint(1, level - 1) for _ in range(self.choose.randint(0, 2))]
        tops = self.switches(level, self.choose.choice([1, 1, 2, 3]))
        for height in heights:
            self.join(self.tree(height, missing, root=False), tops, missing)
        return tops


def ragged(seed: int, missing: float = 0.0) -> Cables:
    """A tree with several roots, whose leaves hang at any height."""
    cables = Cables(random.Random(seed), rails=1 + seed % 2)
    cables.tree(cables.choose.choice([2, 3, 3, 4]), missing)
    return cables


def flat(seed: int) -> Cables:
    """Leaves alone, cabled to each other."""
    cables = Cables(random.Random(seed), rails=1)
    leaves = [cables.leaf_set()[0] for _ in range(cables.choose.randint(1, 6))]
    for number, leaf in enumerate(leaves[1:], start=1):
        for other in cables.choose.sample(leaves[:number], cables.choose.randint(1, min(2, number))):
            cables.laid.append((leaf, other))
    return cables


def anything(seed: int) -> Cables:
    """A ragged fabric that lost cables and got others, with spare switches and with hosts on some upper switch."""
    cables = ragged(seed, missing=0.3)
    known = list(cables.level)
    for _ in range(cables.choose.randint(0, 2)):
        cables.laid.append(tuple(cables.choose.sample(known, 2)))  # type: ignore[arg-type]
    for _ in range(cables.choose.randint(0, 2)):
        spare = cables.switches(0, 1)
        cables.join(spare, cables.choose.sample(known, cables.choose.randint(1, min(2, len(known)))), 0.0)
    if cables.choose.random() < 0.3:
        # On an upper switch, so that nothing says that it is on another rail than the first.
        upper = [switch for switch in known if cables.level[switch] > 1]
        cables.laid.append((f"h{cables.hosts} m0", cables.choose.choice(upper)))
    return cables


def kinds(seeds: range) -> Iterator[tuple[int, Cables]]:
    """A fabric a seed, of each kind in turn."""
    for seed in seeds:
        yield seed, (ragged, flat, anything, anything)[seed % 4](seed)
