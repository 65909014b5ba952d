"""What a user's script may do on two ranks: end well, or in one of several bad ways."""

import builtins
import os
import signal
import sys
import time

import numpy as np

import hpctrain as ht


def metrics(comm) -> None:
    """A metric over all ranks' samples is that of one process on all of them, which each rank computes beside it."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(41, 4, dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    data = TensorDataset(x, y)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).double()
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # Of the 41 samples the last batch has one, so that a rank has fewer batches than the other.
    tested = ht.shard(DataLoader(data, batch_size=8), evaluation=True)
    loss_of = torch.nn.functional.cross_entropy
    for x_batch, y_batch in ht.shard(DataLoader(data, batch_size=20, shuffle=True, drop_last=True)):
        optimizer.zero_grad()
        loss = loss_of(model(x_batch), y_batch)
        loss.backward()
        optimizer.step()
        ht.log(loss=loss)
    ht.average_statistics(model)
    model.eval()
    own, total, pairs = 0, 0.0, []
    with torch.no_grad():
        for x_batch, y_batch in tested:
            logits = model(x_batch)
            total += loss_of(logits, y_batch, reduction="sum").item()
            own += len(y_batch.local)
            pairs.append((logits.argmax(1), y_batch))
        alone = model(x)
    predicted, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
    found = total / len(labels)
    accuracy = (predicted == labels).double().mean().item()
    ht.log({"test/accuracy": accuracy})
    print("samples", len(labels), "of", comm.allgather_object(own))
    print("loss off by", abs(found - loss_of(alone, y).item()))
    print("accuracy off by", abs(accuracy - (alone.argmax(1) == y).double().mean().item()), flush=True)


what = sys.argv[1]
if what == "leave":
    # Without MPI: the launcher alone has to end the others.
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        sys.exit(7)
    time.sleep(600)

comm = ht.init()
print("arguments", sys.argv[2:], flush=True)
match what:
    case "sum":
        print("sum", comm.allreduce(np.array([comm.rank + 1.0]), "sum"), os.environ["OMP_NUM_THREADS"], flush=True)
    case "metrics":
        metrics(comm)
    case "raise":
        if comm.rank == 1:
            print("about to fail", flush=True)
            # As many scripts do on all ranks but one.
            builtins.print = lambda *_, **__: None  # type: ignore[assignment]
            raise ValueError("boom")
        comm.barrier()
    case "kill":
        if comm.rank == 1:
            print("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    case "wait":
        if comm.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        comm.barrier()
        print("ready", flush=True)
        time.sleep(600)
