"""The reader of published runs, and the fit to them, which benchmarks/predictions.py llm uses."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformer_fit
import transformer_ranges
import transformer_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.control.predict.transformers.rates import step_constants

ROW = {
    "row_id": "one",
    "source_id": "a-source",
    "family": "a-family",
    "model": "Llama-3-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "mlp": "swiglu",
    "vocab": "128256",
    "seq_len": "8192",
    "micro_batch": "1",
    "global_batch": "64",
    "gpu_type": "H100-80GB",
    "gpu_count": "32",
    "gpus_per_node": "8",
    "network": "8 x NDR InfiniBand 400 Gb/s a node",
    "dtype": "fp8",
    "dp": "4",
    "tp": "4",
    "pp": "2",
    "cp": "1",
    "vp": "4",
    "act_ckpt": "none",
    "framework": "NeMo / Megatron-Core",
    "tokens_per_s_per_gpu_norm": "7000",
}


def table(tmp_path: Path, rows: Iterable[Mapping[str, str]]) -> transformer_runs.Table:
    """The table of a file of these rows."""
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return transformer_runs.read_table(path)


def test_a_row_becomes_a_network_a_layout_and_a_system(tmp_path: Path) -> None:
    (run,) = table(tmp_path, [ROW]).runs
    assert run.network.parameters.total == 8030261248
    assert run.layout.sizes == {"dp_replicate": 1, "dp_shard": 4, "pp": 2, "cp": 1, "tp": 4}
    assert (run.layout.schedule, run.layout.virtual_stages) == ("interleaved_1f1b", 4)
    assert (run.layout.micro_batch, run.layout.micro_batches, run.layout.zero) == (1, 16, 1)
    assert run.layout.sequence_parallel and run.layout.asynchronous_tp and run.layout.precision == "fp8"
    assert (run.system.name, run.system.joined, run.system.network_bytes_per_s) == ("h100-sxm", 8, 50e9)
    assert (run.software, run.measured, run.guessed) == ("nemo", 7000, ())


_KEPT = ("row_id", "source_id", "family")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([key for key in ROW if key not in _KEPT]),
        st.sampled_from(["", "?", "n/a", "3", "0", "-1", "nan", "1e400", "7%", "1,000", "2.5", "yes", "fp8"]),
        max_size=8,
    )
)
def test_no_row_is_dropped_in_silence(tmp_path: Path, cells: dict[str, str]) -> None:
    found = table(tmp_path, [{**ROW, **cells}])
    assert len(found.runs) + len(found.left_out) == 1
    for run in found.runs:
        assert run.tokens_per_s() > 0


def test_the_fit_finds_the_constants_of_runs_that_the_model_made(tmp_path: Path) -> None:
    rows = [
        {
            **ROW,
            "row_id": f"{family}-{width}-{batch}",
            "family": family,
            "hidden": str(width),
            "micro_batch": str(batch),
        }
        for family in ("one", "two", "three")
        for width in (2048, 4096, 8192)
        for batch in (1, 2, 4)
    ]
    runs = table(tmp_path, rows).runs
    truth = {**step_constants(), "matmul": 0.6, "software.nemo": 1.0}
    made = [replace(run, measured=run.tokens_per_s(truth)) for run in runs]
    fit = transformer_fit.Fit(made)
    before = np.abs(fit.predicted(fit.prior) - fit.measured).max()
    after = np.abs(fit.predicted(fit.all()) - fit.measured).max()
    assert before > 0.1 and after < 0.05
    cases = transformer_fit.predicted_cases(made, shipped=False, removed=False)
    assert max(abs(case.error) for case in cases) < 0.05
    assert {case.run.family for case in cases} == {"one", "two", "three"}


def test_a_column_costs_what_completing_it_has_changed(tmp_path: Path) -> None:
    rows = [{**ROW, "row_id": str(number), "micro_batch": str(1 + number % 4)} for number in range(24)]
    lost = transformer_ranges.incomplete(table(tmp_path, rows).runs)
    costs = transformer_ranges.column_costs(lost)
    assert len(lost) > 40 and min(costs.values()) >= 0
    # Other software is another speed.
    assert costs["framework"] > 0.1
    whole = table(tmp_path, [ROW]).runs[0]
    ranges = transformer_ranges.made([whole], [0.1] * len(lost), lost)
    part = replace(whole, guessed=("framework",))
    assert transformer_ranges.spread_of(part, ranges) > transformer_ranges.spread_of(whole, ranges)


def test_the_blind_fold_is_chosen_by_name(tmp_path: Path) -> None:
    runs = table(tmp_path, [{**ROW, "family": family} for family in ("torchao", "mosaicml", "vtrain")]).runs
    assert [transformer_fit.is_blind(run) for run in runs] == [True, False, False]
    assert {case.run.family for case in transformer_fit.blind_cases(runs)} == {"torchao"}


def test_software_that_is_like_another_shares_its_factor(tmp_path: Path) -> None:
    rows = [{**ROW, "framework": name, "dtype": "bf16"} for name in ("torchtitan", "Composer", "InternLM", "NeMo")]
    fit = transformer_fit.Fit(table(tmp_path, rows).runs)
    assert [name for name in fit.names if name.startswith("software.")] == ["software.nemo", "software.pytorch"]
    logs = fit.prior.copy()
    logs[fit.names.index("software.pytorch")] = np.log(0.5)
    values = fit.values(logs)
    assert [values[f"software.{name}"] for name in ("composer", "internlm", "pytorch", "nemo")] == [0.5, 0.5, 0.5, 1.0]
    # Half the speed of the three, all of it.
    assert np.allclose(fit.predicted(logs) - fit.predicted(fit.prior), [np.log(0.5)] * 3 + [0.0])
    assert step_constants()["software.composer"] == step_constants()["software.pytorch"]


def test_sweeps_have_kendall_s_tau_and_the_distance_from_the_best() -> None:
    sweep = transformer_fit.Sweep("a sweep", [4.0, 3.0, 2.0, 1.0], [4.0, 2.0, 3.0, 1.0])
    assert sweep.tau == pytest.approx(4 / 6) and sweep.short == 0
    other = transformer_fit.Sweep("another", [4.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    assert other.short == pytest.approx(0.25)


def test_published_limits_of_memory_are_predicted_but_for_two() -> None:
    found = transformer_runs.read_table(Path(transformer_runs.__file__).with_name("memory_limits.csv"))
    assert len(found.runs) == 65 and not found.left_out
    wrong = {run.name for run in found.runs if transformer_fit.fits(run) != run.fits}
    assert wrong == {"bigscience-176b-26", "torchtitan-01"}
    dropout = {run.name for run in found.runs if run.layout.dropout and not run.layout.deepspeed_pipeline}
    assert dropout == {f"alibaba-pai-{each:02}" for each in (1, 2)} | {
        f"deepspeed-zero-{each:02}" for each in (1, 2, 3)
    }
