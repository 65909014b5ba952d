"""The options ``--mesh`` and ``--model`` of ``topology place``."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.mesh import parse_mesh
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork

if TYPE_CHECKING:
    from hpctrain.control.topology.fabric import Fabric
    from hpctrain.control.topology.mesh_layout import Laid
    from hpctrain.control.topology.placement import PlacementReport

MODEL_KEYS = tuple(field.name for field in fields(MeshModel))
LaidMeshOption = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXIS=RANKS,…", help="Lay this mesh over the hosts, such as tp=8,pp=4,dp_shard=16."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="KEY=NUMBER,…",
        help=f"The model trained on the mesh: {', '.join(MODEL_KEYS)}; by default the 76.1-billion-parameter model of "
        "Narayanan et al. 2021, table 1.",
    ),
]

_EXAMPLE = "for example --model parameters=7e9,layers=32,width=4096,sequence=4096,samples=16"

# The model of Narayanan et al. 2021, arXiv 2104.04473, table 1, that is trained with tp 8 and pp 4: 60 layers of width
# 10240, batches of 1792 samples of 2048 tokens; settings in NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh. The
# element types are torchtitan's: gradients are reduced in float32, all else travels in bf16.
_PUBLISHED = MeshModel(
    parameters=76.1e9, layers=60, width=10240, sequence=2048, parameter_bytes=2, gradient_bytes=4, activation_bytes=2
)
_PUBLISHED_BATCH = 1792


def laid_mesh(
    fabric: Fabric, found: PlacementReport, mesh: str | None, model: str | None, ranks_per_host: int
) -> Laid | None:
    """The mesh over placed hosts; None without one. For ``mesh`` and ``model`` see :func:`asked_work`."""
    from hpctrain.control.topology.mesh_layout import lay

    given = found.given.order
    work = asked_work(mesh, model, ranks_per_host * len(given))
    return lay(fabric, given, found.placed.order, dict.fromkeys(given, ranks_per_host), work) if work else None


def asked_work(mesh: str | None, model: str | None, ranks: int) -> MeshWork | None:
    """The mesh with what is trained on it; None without one.

    Args:
        mesh, model: the texts of ``--mesh`` and ``--model``.
        ranks: the number of ranks on all hosts.

    Raises:
        HpctrainError: a text is invalid, or the mesh does not fit the ranks.
    """
    if mesh is None:
        if model is not None:
            raise HpctrainError(
                "HT-option-needs-another", "--model is what a mesh trains", "add --mesh tp=8,pp=4,dp_shard=-1"
            )
        return None
    asked = parse_mesh(mesh).at(ranks)
    if model is None:
        samples = _PUBLISHED_BATCH / asked.data_ranks
        return MeshWork(mesh=asked, model=MeshModel(**{**vars(_PUBLISHED), "samples": samples}))
    found = _model(model)
    missing = [key for key in ("layers", "width", "sequence", "samples") if not getattr(found, key)]
    if missing and any(asked.sizes[axis] > 1 for axis in ("pp", "cp", "tp")):
        raise HpctrainError(
            "HT-mesh-model-not-valid",
            "--model {model} lacks {missing}, which mesh {mesh} divides",
            _EXAMPLE,
            model=model,
            missing=", ".join(missing),
            mesh=asked,
        )
    return MeshWork(mesh=asked, model=found)


def _model(text: str) -> MeshModel:
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, number = part.partition("=")
        if key not in MODEL_KEYS:
            raise HpctrainError(
                "HT-mesh-model-not-valid",
                "--model {model}: unknown key {key!r}",
                nearest(key, MODEL_KEYS),
                model=text,
                key=key,
            )
        values[key] = _number(text, part, number)
    if "parameters" not in values:
        raise HpctrainError("HT-mesh-model-not-valid", "--model {model}: how many parameters?", _EXAMPLE, model=text)
    whole = {key: int(value) for key, value in values.items() if key in ("layers", "width", "sequence")}
    return MeshModel(**{**values, **whole})  # type: ignore[arg-type]


def _number(text: str, part: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise HpctrainError(
            "HT-mesh-model-not-valid",
            "--model {model}: {part!r} is not of the form KEY=NUMBER",
            _EXAMPLE,
            model=text,
            part=part,
        )
    return value
