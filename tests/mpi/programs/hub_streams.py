"""What ``ht.shard`` does with Hugging Face's ``datasets`` and with torchdata. ``python hub_streams.py BACKEND OUT``.

Each rank compares its parts with the batches of one process, which are also those of the plain loader.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import datasets
import torch
import torchdata.nodes
from datasets.distributed import split_dataset_by_node
from situations import Named, refused, run
from streams import SAMPLES, as_one_process, as_record, begin, drawn, numbers, once, resumes
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import hpctrain as ht
from hpctrain.worker.comm import current

SITUATIONS = situation = Named()
# A stream of Parquet files that is left before its end sleeps for 5 seconds otherwise.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
datasets.disable_progress_bars()
FOLDER = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))) / "data"


def files(comm) -> Path:
    """The samples in five Parquet files, the same for all ranks."""
    folder = Path(comm.broadcast_object(str(FOLDER)))
    if comm.rank == 0 and not folder.exists():
        folder.mkdir()
        x, y = (each.tolist() for each in numbers())
        for shard in range(5):
            rows = [{"number": n, "x": x[n], "y": y[n]} for n in range(shard, SAMPLES, 5)]
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{shard}.parquet")
    comm.barrier()
    return folder


def streamed():
    paths = [str(files(current()) / f"{shard}.parquet") for shard in range(5)]
    return datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)


def collate(samples) -> torch.Tensor:
    return torch.tensor([int(each["number"]) for each in samples])


def loader(data, workers=0, kind=DataLoader, **settings):
    return kind(data, batch_size=6, num_workers=workers, collate_fn=collate, **settings)


def shuffled():
    read = streamed().shuffle(seed=4, buffer_size=10).map(lambda each: {**each, "more": 1})
    return read.filter(lambda each: each["more"]).with_format("torch")


@situation
def streams_of_datasets(comm):
    for workers, kind in [(0, StatefulDataLoader), (2, DataLoader)]:
        found = as_one_process(lambda w=workers, k=kind: loader(shuffled(), w, k))
        once(found)
        assert found[0] != found[1]
        assert drawn(loader(shuffled(), workers, kind)) == found[0]
        resumes(lambda w=workers, k=kind: loader(shuffled(), w, k), 3)


@situation
def streams_that_datasets_has_divided(comm):
    if comm.size == 1:
        return
    for change in (lambda data: data, lambda data: data.shuffle(seed=3, buffer_size=5).map(lambda each: each)):
        data = change(split_dataset_by_node(streamed(), comm.rank, comm.size))
        refused(lambda: ht.shard(loader(data, drop_last=True)), "HT-shard-divided-already")  # noqa: B023
    whole = datasets.Dataset.from_list([{"number": number} for number in range(SAMPLES)])
    part = split_dataset_by_node(whole, comm.rank, comm.size)
    refused(lambda: ht.shard(loader(part)), "HT-shard-different-data")


@situation
def data_sets_of_datasets_in_torchdatas_loader(comm):
    data = datasets.Dataset.from_list([{"number": number} for number in range(SAMPLES)]).with_format("torch")
    for kind in (DataLoader, StatefulDataLoader):
        found = as_one_process(lambda k=kind: loader(data, kind=k, shuffle=True))
        once(found)
        assert found[0] != found[1]
        resumes(lambda k=kind: loader(data, kind=k, shuffle=True), 3)


@situation
def nodes_of_torchdata(comm):
    nodes = torchdata.nodes.Loader(torchdata.nodes.IterableWrapper(range(SAMPLES)))
    refused(lambda: ht.shard(nodes), "HT-argument-not-valid")


if __name__ == "__main__":
    run({name: as_record(action) for name, action in SITUATIONS.items()}, begin)
