"""The schema of a recipe: what to train, with every number that affects the result."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.compatibility import climbs, incompatibilities
from hpctrain.common.recipes.sections import RecipeKeys, Reported


class Recipe(RecipeKeys):
    """One complete training, whose keys fit together."""

    @property
    def global_batch(self) -> int:
        """The samples of one step over all ranks, for a recipe that :meth:`at` made for a number of ranks."""
        assert self.batch.size is not None
        return self.batch.size

    def at(self, ranks: int) -> Recipe:
        """The recipe with everything resolved that depends on the number of ranks. Its mesh stays as it is."""
        return self.at_data_ranks(self.mesh.at(ranks).data_ranks)

    def at_data_ranks(self, ranks: int) -> Recipe:
        """The same for a number of data-parallel ranks.

        Raises:
            HpctrainError: the rate that is scaled to their batch is below the one that it is to fall to.
        """
        found = self.model_copy(update={"batch": self.batch.at(ranks)})
        if problem := climbs(found):
            raise HpctrainError(
                "HT-keys-not-together", "{problem}", "--set schedule.end_rate=0, or more ranks", problem=problem
            )
        return found

    def begun(self) -> Recipe:
        """The recipe without the weights that its training begins with."""
        return self.model_copy(update={"model": self.model.model_copy(update={"init_from": None, "new_head": "auto"})})

    def computing(self, micro_batch: int) -> Recipe:
        """The recipe with so many samples of a rank at once."""
        return self.model_copy(update={"batch": self.batch.model_copy(update={"micro_batch": micro_batch})})

    def reported_at(self, batch: int) -> Reported | None:
        """The source's result for a batch; None if it reports other batches only, and for a smoke run."""
        rows = [row for row in self.reported if row.batch in (None, batch) and not self.smoke]
        return next(iter(sorted(rows, key=lambda row: row.batch is None)), None)

    def faults(self) -> Iterator[str]:
        return incompatibilities(self)
