"""Which patterns of tests/mpi/programs are refused where a batch does not divide evenly over the ranks."""

from __future__ import annotations

# What cannot be told, or has another meaning on ranks than in one process, where a batch does not divide evenly.
REFUSED = {
    "micro_batches",
    "copied_micro_batches",
    "two_views_joined",
    "data_of_its_own",
    "compiled_function_of_listed_batches",
    "parameters_used_directly_on_listed_batches",
    "sum_of_two_batches",
    "training_on_an_evaluation",
}
# Copies of batches that were not drawn just before: over 3 ranks a rank has as many samples of either batch size.
REFUSED_OVER_3 = REFUSED | {
    "prefetched_copies",
    "copied_by_a_thread",
    "adversarial_pair",
}
