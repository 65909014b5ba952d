"""Images a second of the loaders, by the number of their processes, as ``hpctrain bench loader`` measures them."""

from __future__ import annotations

import json
import os

from support.gpu_sections import GPUS, launch, of_make_gpu

pytestmark = of_make_gpu


def test_images_a_second_by_workers(tmp_path, note):
    """On 1, 4, 8 and 14 processes, as far as there are cores."""
    cores = len(os.sched_getaffinity(0))
    workers = [count for count in (1, 4, 8, 14) if count <= max(1, cores - 1)]
    options = [word for count in workers for word in ("--workers", str(count))]
    rounds = "5" if GPUS else "1"
    done = launch(tmp_path, "bench", "loader", *options, "--rounds", rounds, "--json", seconds=220)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    note(workers=workers, cores=cores, found=found)
    assert found
