"""What does not fit a model or a mesh is refused before anything is divided."""

from __future__ import annotations

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.worker.adapters.torch.parallel.parallel_plan import names_of  # noqa: E402
from hpctrain.worker.adapters.torch.parallel.stages import Cut, ties_of  # noqa: E402


class Attention(nn.Module):
    def __init__(self, head_size: int = 4) -> None:
        super().__init__()
        self.head_size = head_size
        self.query = nn.Linear(12, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(12, 10)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 12)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(layers)})
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 9, bias=False)


def test_modules_are_meant_by_class_by_the_name_of_the_class_and_by_name():
    model = Model()
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names_of(model, [Block], "shard") == blocks
    assert names_of(model, ["Block"], "shard") == blocks
    assert names_of(model, ["blocks.*"], "shard") == blocks
    assert names_of(model, ["norm", "blocks.1.*"], "shard") == ["blocks.1.attention", "blocks.1.up", "norm"]


@pytest.mark.parametrize(
    ("plan", "key", "module", "meant"),
    [
        (ht.ParallelPlan(shard=["Blocks"]), "shard", "Blocks", "'Block'"),
        (ht.ParallelPlan(shard=[nn.Conv2d]), "shard", "Conv2d", "valid: "),
        (ht.ParallelPlan(recompute=["block.*"]), "recompute", "block.*", "'blocks.*'"),
        (
            ht.ParallelPlan(tensor={"blocks.*.atention.query": ColwiseParallel()}),
            "tensor",
            "blocks.*.atention.query",
            "'blocks.*.attention.query'",
        ),
    ],
)
def test_a_plan_that_names_no_module_is_refused_with_the_nearest(plan, key, module, meant):
    with refused("HT-parallel-plan-not-valid", key=key, module=module, model="Model") as raised:
        plan.check(Model())
    assert meant in raised.value.hint


def test_stages_have_about_equally_many_blocks_and_the_ends_of_the_model():
    cut = Cut.of(Model(layers=5), "blocks", 3)
    assert cut.keys == (("0", "1"), ("2", "3"), ("4",))
    assert [cut.stage_of(name) for name in ("tokens.weight", "blocks.2.up.bias", "norm.weight", "head.weight")] == [
        0,
        1,
        2,
        2,
    ]


def test_a_stage_keeps_its_names_and_lets_go_of_the_rest():
    model = Model(layers=4)
    everything = dict(model.named_parameters())
    first, last = Cut.of(model, "blocks", 4).take(model, [0, 3])
    assert first is model
    names = [dict(part.named_parameters()) for part in (first, last)]
    assert {name.split(".")[0] for name in names[0]} == {"tokens", "blocks"}
    assert [name for name in names[0] if name.startswith("blocks")] == [
        name for name in everything if name.startswith("blocks.0")
    ]
    assert {name.split(".")[0] for name in names[1]} == {"blocks", "norm", "head"}
    assert all(value is everything[name] for part in names for name, value in part.items())
    assert (first.head, last.tokens) == (None, None)


def test_tied_parameters_of_two_stages_are_found():
    model = Model()
    model.head.weight = model.tokens.weight
    (tie,) = ties_of(model, Cut.of(model, "blocks", 3))
    assert (tie.names, tie.stages) == (("tokens.weight", "head.weight"), (0, 2))


@pytest.mark.parametrize(
    ("blocks", "stages", "code", "values"),
    [
        ("blocks", 4, "HT-model-not-divisible", {"stages": 4, "layers": 3}),
        ("layers", 2, "HT-pipeline-not-for-model", {}),
        ("head", 2, "HT-pipeline-not-for-model", {}),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(blocks, stages, code, values):
    with refused(code, model="Model", blocks=blocks, **values):
        Cut.of(Model(), blocks, stages)
