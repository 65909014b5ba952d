"""A script's steps are counted on from where it says that it was resumed, however an attempt ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import kept, read_events
from support import needs
from support.launching import Launch

# Each trains 20 steps and saves every 5, and is killed after some.
_END = """
def maybe_die(step):
    for number in map(int, os.environ["DEATHS"].split()):
        if step == number and not os.path.exists(f"died-{number}") and int(os.environ.get("RANK", 0)) == 0:
            open(f"died-{number}", "w").close()
            os.kill(os.getpid(), 9)
"""
PLAIN = (
    """
import os
import torch
import torch.distributed as dist
import hpctrain as ht
from torch.nn.parallel import DistributedDataParallel
"""
    + _END
    + """
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    model.module.load_state_dict(state["model"])
    step = state["step"]
    ht.resumed_at(step)
while step < 20:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, "new.pt")
        os.replace("new.pt", "state.pt")
    maybe_die(step)
"""
)
SHARDED = (
    """
import os
import torch
import hpctrain as ht
"""
    + _END
    + """
torch.manual_seed(0)
comm = ht.init()
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = ht.shard(torch.utils.data.DataLoader(data, batch_size=2))
model = torch.nn.Linear(4, 1)
model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
step = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt")
    model.load_state_dict(state["model"])
    loader.load_state_dict(state["loader"])
    step = state["step"]
    ht.resumed_at(step)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        state = {"model": model.state_dict(), "loader": loader.state_dict(), "step": step}
        if comm.rank == 0:
            torch.save(state, "new.pt")
            os.replace("new.pt", "state.pt")
        comm.barrier()
    maybe_die(step)
assert step == 20
"""
)
KERAS = (
    """
import os
import numpy as np
import keras
import hpctrain as ht
"""
    + _END
    + """
ht.init()
if os.path.exists("model.keras"):
    model = keras.saving.load_model("model.keras")
    ht.resumed_at(int(model.optimizer.iterations))
else:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
ht.distribute(model, model.optimizer)

class Save(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if step % 5 == 0:
            self.model.save("new.keras")
            os.replace("new.keras", "model.keras")
        maybe_die(step)
        if step == 20:
            self.model.stop_training = True

x = np.ones((8, 4), "float32")
done = int(model.optimizer.iterations)
model.fit(x, x[:, :1], batch_size=2, epochs=5 - done // 4, callbacks=[*ht.keras.callbacks(), Save()], verbose=0)
"""
)


@pytest.mark.parametrize(
    ("text", "ranks", "deaths"),
    [
        pytest.param(PLAIN, "1", (8, 12), marks=needs.pytorch, id="plain"),
        pytest.param(SHARDED, "2", (8,), marks=[needs.pytorch, pytest.mark.thorough], id="sharded"),
        pytest.param(KERAS, "1", (12,), marks=pytest.mark.thorough, id="keras"),
    ],
)
def test_steps_after_a_hard_death_are_neither_lost_nor_counted_twice(
    hpctrain: Launch, tmp_path: Path, text: str, ranks: str, deaths: tuple[int, ...]
) -> None:
    if "keras" in text:
        pytest.importorskip("keras")
    (tmp_path / "script.py").write_text(text)
    result = hpctrain(
        "run", "script.py", "-np", ranks, "--run-dir", "run", "--restarts", "2", DEATHS=" ".join(map(str, deaths))
    )
    assert result.returncode == 0, result.stdout
    directory = RunDirectory(tmp_path / "run")
    assert json.loads(directory.summary.read_text())["steps"] == 20
    events = [*read_events(directory.events)]
    assert [event.iteration for event in events if event.event == "continued"] == [death // 5 * 5 for death in deaths]
    assert [event.iteration for event in kept(events) if event.event == "step"] == [*range(1, 21)]
