"""What a verified run computes: files that each rank writes, one for each step of an optimizer.

Small tensors are kept as they are. Of a larger one its norm is kept and a random projection, which is linear, so that
the norm of a difference is known to about three percent: its elements are multiplied by fixed random signs, and added
up in as many sums as a small tensor may have elements (a count sketch, Charikar et al. 2002).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular
from hpctrain.common.files.whole import write_whole

SUMS = 1024
"""The most elements of a tensor that is kept as it is, and the number of sums of a larger one."""

NAMELESS = "tensor "
"""What begins the name of a tensor that no model has; its place in its optimizer follows."""

_CHUNK = 2**20
_MOST_BYTES = 2**32
_MOST_FACTS = 2**24


@functools.cache
def _signs() -> NDArray[np.float64]:
    signs: NDArray[np.float64] = np.random.default_rng(0).integers(0, 2, _CHUNK).astype(np.float64) * 2 - 1
    return signs


def projection(flat: Any, numbers: Callable[[Any], NDArray[Any]]) -> tuple[float, NDArray[np.float64]]:
    """The norm of a tensor of one dimension, and its elements or their projection."""
    count, total, square = flat.shape[0], np.zeros(SUMS), 0.0
    if count <= SUMS:
        values = numbers(flat).astype(np.float64)
        return float(np.linalg.norm(values)), values
    for number, begin in enumerate(range(0, count, _CHUNK)):
        part = numbers(flat[begin : begin + _CHUNK]).astype(np.float64)
        square += float(part @ part)
        signed = np.zeros(-(-len(part) // SUMS) * SUMS)
        np.multiply(part, _signs()[: len(part)], out=signed[: len(part)])
        # Parts have the same signs, but for one of their own.
        total += _signs()[number] * signed.reshape(-1, SUMS).sum(0)
    return math.sqrt(square), total


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept of a tensor at a step.

    Attributes:
        kind: ``gradient``, what the optimizer got; ``parameter``, after the step; ``own``, the gradient of this rank
            before any reduction.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    values: NDArray[np.float64]

    @property
    def whole(self) -> bool:
        """Whether the values are the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) <= SUMS

    @property
    def key(self) -> tuple[str, str]:
        """What it is compared by."""
        return self.kind, self.name


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step of an optimizer on a rank.

    Attributes:
        samples: a number for each sample that a model got as input since the step before, from its elements.
    """

    samples: NDArray[np.float64]
    kept: tuple[Kept, ...]


@dataclass(kw_only=True)
class RankFacts:
    """What is known of a rank's models and its end.

    Attributes:
        random: models that draw random numbers while they train, as in Dropout.
        own_statistics: batch normalisations that use the samples of their rank.
        low: the floating type with the fewest bits in which the models compute.
        batches: whether a model got batches that ``ht.shard`` divides.
    """

    random: list[str] = field(default_factory=list)
    own_statistics: list[str] = field(default_factory=list)
    low: str = ""
    batches: bool = False
    complete: bool = False


class StepFiles:
    """The files of one rank, in ``RUN_DIR/steps/rank-N``."""

    def __init__(self, run: Path, rank: int) -> None:
        self._folder = run / "steps" / f"rank-{rank}"
        self._count = 0

    def begin(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, step: StepRecord) -> None:
        """Write a step."""
        head = {
            "samples": len(step.samples),
            "kept": [[tensor.kind, tensor.name, list(tensor.shape), tensor.dtype, tensor.norm] for tensor in step.kept],
        }
        numbers = np.concatenate([step.samples, *(tensor.values.reshape(-1) for tensor in step.kept)])
        content = json.dumps(head).encode() + b"\n" + numbers.astype("<f8").tobytes()
        write_whole(self._folder / f"step-{self._count:05}", content, private=True)
        self._count += 1

    def write(self, facts: RankFacts) -> None:
        """Write what is known of the rank, over what was."""
        write_whole(self._folder / "facts.json", json.dumps(asdict(facts)).encode(), private=True)

    def read(self) -> tuple[RankFacts, list[StepRecord]]:
        """What this rank wrote, as far as it got."""
        try:
            facts = RankFacts(**json.loads(read_regular(self._folder / "facts.json", _MOST_FACTS, links=False)))
            steps = [_read(path) for path in sorted(self._folder.glob("step-*"))]
        except FileNotFoundError:
            return RankFacts(), []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise HpctrainError(
                "HT-verify-records-unreadable",
                "the steps in {path} cannot be read: {reason}",
                "verify again; nothing else may write there",
                exit_code=1,
                path=self._folder,
                reason=error,
            ) from error
        return facts, steps


def _read(path: Path) -> StepRecord:
    """A step: a line of JSON, then numbers in double precision, of the samples and of what is kept."""
    first, _, rest = read_regular(path, _MOST_BYTES, links=False).partition(b"\n")
    head, numbers = json.loads(first), np.frombuffer(rest, "<f8")
    begin = int(head["samples"])
    samples, kept = numbers[:begin], []
    for kind, name, shape, dtype, norm in head["kept"]:
        size = min(int(np.prod(shape, dtype=np.int64)), SUMS)
        part = numbers[begin : begin + size]
        begin += size
        kept.append(Kept(kind=kind, name=name, shape=tuple(shape), dtype=dtype, norm=norm, values=part))
    return StepRecord(samples=samples, kept=tuple(kept))


def read_ranks(run: Path, ranks: int) -> list[tuple[RankFacts, list[StepRecord]]]:
    """What each rank of a run wrote."""
    return [StepFiles(run, rank).read() for rank in range(ranks)]
