"""Whether a loss that is a sum over a rank's samples is divided by their number, as far as its factors tell.

The mean over the ranks of sums that are divided by a constant is too small by the number of ranks. But a constant may
also be a count, or a weight of the loss: certain errors are refused, doubtful ones warned of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hpctrain.worker.adapters.torch.divisors import ROUNDING, Divided, is_doubling

# Weights of losses that scripts commonly write: a factor of 0.05 may be a weight, or 0.2 / 4 for 4 samples.
_WEIGHTS = {
    *(digit / 100 for digit in range(1, 10)),
    *(digit / 10 for digit in range(1, 10)),
    *(0.25, 0.75, 2, 5, 10),
}


class DivisorProblem(NamedTuple):
    """What a sum is divided by that is not, or not certainly, the number of the rank's own samples.

    Attributes:
        how: a predicate for messages, such as "is divided by 4".
        certain: whether the divisor certainly is another number.
    """

    how: str
    certain: bool


class _Factor(NamedTuple):
    """A number that a sum is divided by, or multiplied by its reciprocal."""

    divisor: float
    is_division: bool


def divisor_problem(part: Divided, *, samples: Sequence[int], ranks: int, accumulated: int) -> DivisorProblem | None:
    """What is wrong, or doubtful, with the divisor of a sum; None where it is a count of the rank's own.

    Args:
        samples: the sizes of the global batches, the last one drawn first. The sum may be over another batch.
        ranks: the number of ranks that compute different samples.
        accumulated: the number of backward passes of one update.
    """
    shares = {share for total in samples for share in (total // ranks, -(-total // ranks))}
    if max(shares) < 2:
        return None  # division by a single sample cannot be told from none
    whole, counts = part.unscaled, {each for each in (*shares, part.elements) if each > 1}
    factors = [_Factor(each, True) for each in part.over]
    factors += [_Factor(1 / each, False) for each in part.times if each and not is_doubling(each)]
    passes = next((each for each in factors if accumulated > 1 and _close(each.divisor, accumulated)), None)
    left = [each for each in factors if each is not passes]
    of_own = {count * times for count in counts for times in (1, accumulated)}
    # A rank may have as many samples as there are passes; then either may be the divisor.
    certain = passes is None or not _is_among(passes.divisor, counts)
    products = (whole, part.divisor) if certain else ()
    if any(_is_among(each, of_own) for each in (*products, *(each.divisor for each in left))):
        return None
    # Weights of the elements may add up to one.
    certain &= not part.weighted
    is_single = samples[0] < 2 * ranks
    if is_single and (whole <= 1 or any(each.is_division and each.divisor == 1 for each in left)):
        return None
    # A factor may be a weight that was divided by the rank's own samples before.
    own = {share * times for share in shares if share > 1 for times in (1, accumulated)}
    if not any(each.is_division for each in left):
        certain &= not any(_is_among(each * count, _WEIGHTS) for each in part.times if each != 1 for count in own)
    if whole <= 1:
        return DivisorProblem("is not divided by anything", certain)
    left = [each for each in left if each.divisor != 1]
    of_all = {*(each for each in samples if each > ranks), part.elements * ranks} - {0}
    if found := [each for each in (whole, *(each.divisor for each in left)) if _is_among(each, of_all)]:
        # Half the squares are divided by twice the samples, which are as many as those of two ranks.
        is_half = any(_is_among(each, {2 * share for share in shares}) for each in found)
        return DivisorProblem(f"is divided by the {found[0]:g} of the whole batch", certain and not is_half)
    if not left and passes is not None:
        return DivisorProblem(f"is divided by nothing but the {accumulated} passes of an update", certain)
    divisions = [each.divisor for each in left if each.is_division]
    with_one = counts | ({1} if is_single else set())
    if any(_is_of_tokens(each, with_one, part.elements, accumulated) for each in divisions):
        return None
    if divisions or not left:
        # Too large for any count of elements, also for one over all ranks.
        too_large = whole > 2 * part.elements * accumulated and not any(_multiple(whole, each) for each in counts)
        return DivisorProblem(f"is divided by {whole:g}", certain and part.exact and too_large)
    number = math.prod(1 / each.divisor for each in left)
    fits = any(_is_of_tokens(each.divisor, counts, part.elements, accumulated) for each in left)
    return DivisorProblem(f"is multiplied by {number:g}", certain and all(map(_is_plain, part.times)) and not fits)


def _is_of_tokens(number: float, counts: set[int], elements: int, accumulated: int) -> bool:
    """Whether a number may count the tokens of each sample, or twice the samples for a loss of half the squares."""
    return any(0 < _multiple(number, each) <= max(2, elements // each) * accumulated for each in counts)


def _multiple(number: float, count: int) -> int:
    """How many times the count a number is; 0 where it is no multiple."""
    times = round(number / count) if number < math.inf else 0
    return times if _close(number, times * count) else 0


def _is_plain(factor: float) -> bool:
    """Whether a factor looks like a literal: 0.02, and not 0.3 / 8."""
    return is_doubling(factor) or _close(factor, float(f"{factor:.1e}"))


def _is_among(number: float, counts: Collection[float]) -> bool:
    return any(_close(number, each) for each in counts)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING)
