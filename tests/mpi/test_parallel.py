"""A model divided over a mesh gives the parameters of one plain process on the full batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "parallel.py"


program = imported(PROGRAM)
CASES = program.CASES
# The sum of a batch in another order: rounding, and what 20 steps make of it. bfloat16 has 8 bits.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 0.05}
_references: dict[tuple, dict[str, np.ndarray]] = {}


FEATURES = ("", "_all", "_frozen", "_float32", "_scaler", "_bare")
FSDP = [f"fsdp{feature}" for feature in FEATURES]
FSDP += ["fsdp_zero2", "fsdp_bfloat16", "fsdp_zero1", "fsdp_zero1_tied", "fsdp_zero1_fused", "replicas_recompute"]
TP = [*(f"tp{feature}" for feature in FEATURES), "tp_sequence"]
PP = [f"pp_{schedule}{feature}" for schedule in program.PIPELINES for feature in ("", "_all")]
PP += ["pp_recompute", "pp_frozen", "pp_scaler"]

HSDP = [*("fsdp", "fsdp_all", "hsdp", "hsdp_all", "hsdp_scaler", "hsdp_zero1"), *("tp_fsdp", "tp_fsdp_all")]
HSDP += ["tp_fsdp_scaler", "tp_fsdp_bare", "tp_replicas_all"]
PP_ON_4 = ["pp_fsdp_1f1b", "pp_fsdp_interleaved_1f1b_all", "pp_fsdp_frozen", "pp_fsdp_scaler"]
PP_ON_4 += ["pp_replicas_1f1b_all", "pp_tp_1f1b_all", "pp4"]

ALL_AXES = ["tp_pp_fsdp_1f1b", "tp_pp_replicas_interleaved_1f1b_all"]

ENGINES = {"fsdp", "fsdp_all", "fsdp_zero1", "fsdp_bfloat16", "tp", "tp_all", "tp_sequence", "hsdp", "hsdp_all"}
ENGINES |= {"tp_fsdp_all", "pp_fsdp_interleaved_1f1b_all", "pp_tp_1f1b_all", "tp_pp_fsdp_1f1b"}
ENGINES |= {f"pp_{schedule}" for schedule in program.PIPELINES}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, ["fsdp_all", "fsdp_zero1", "fsdp_zero1_fused", "fsdp_scaler"], id="some"),
        pytest.param(2, FSDP, id="fsdp", marks=pytest.mark.thorough),
        pytest.param(2, TP, id="tp", marks=pytest.mark.thorough),
        pytest.param(2, PP, id="pp", marks=pytest.mark.thorough),
        pytest.param(3, ["fsdp", "fsdp_all", "fsdp_zero1"], id="fsdp on 3", marks=pytest.mark.thorough),
        pytest.param(4, HSDP, id="hsdp", marks=pytest.mark.thorough),
        pytest.param(4, PP_ON_4, id="pp fsdp", marks=pytest.mark.thorough),
        pytest.param(8, ALL_AXES, id="tp pp fsdp", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.long
def test_equals_one_process_on_the_full_batch(mpirun, tmp_path, ranks, cases):
    # Features that make other calculations, and not other messages, are enough over one of them.
    over = {"gloo": cases, "mpi": [name for name in cases if name in ENGINES]}
    for backend, names in over.items():
        # In one process PyTorch would look for groups of the engine before, by what it keeps of its layouts.
        mpirun(PROGRAM, ranks, str(tmp_path / "out"), f"{backend}={','.join(names)}", timeout=500)
        results = [np.load(tmp_path / f"out-{backend}-{rank}.npz") for rank in range(ranks)]
        for name in names:
            _compare(name, results)


def _compare(name, results):
    case = CASES[name]
    if case.trained not in _references:
        _references[case.trained] = program.reference(name)
    expected = dict(_references[case.trained])
    tolerance = TOLERANCE[str(case.precision or case.dtype).removeprefix("torch.")]
    for result in results:
        found = {key.partition("/")[2]: result[key] for key in result.files if key.startswith(f"{name}/")}
        replicas = len(results) > np.prod([size for axis, size in case.mesh.items() if axis != "dp_replicate"])
        # Parameters that tp does not divide are replicas too.
        assert found.pop("compared") > 0 or not (case.mesh.get("tp") or (replicas and -1 not in case.mesh.values()))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            error = np.abs(found[key] - value).max()
            assert error <= tolerance, f"{name}, {key}: {error}"


@pytest.mark.slow
def test_norms_of_recipes_rules_are_of_whole_parameters(mpirun):
    differences = json.loads(mpirun(PROGRAM.with_name("divided_updates.py"), 4).stdout.splitlines()[-1])
    assert sorted(differences) == ["lamb", "lars", "rmsprop_to_sgd", "sgd"]
    assert all(difference < 1e-13 for difference in differences.values()), differences
