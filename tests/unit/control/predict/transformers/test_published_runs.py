"""The reader of published runs, and the fit to them, which benchmarks/predictions.py llm uses."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformer_fit
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


@pytest.mark.parametrize(
    ("cells", "software", "attention"),
    [
        ({"framework": "Megatron-LM", "gpu_type": "A100-80GB", "dtype": "bf16"}, "megatron-deepspeed", "materialised"),
        ({"framework": "Megatron-LM", "dtype": "bf16"}, "megatron-lm", "flash"),
        ({"framework": "Pax / XLA", "dtype": "bf16"}, "xla", "materialised"),
        ({"framework": "Pax / XLA", "dtype": "bf16 TE"}, "xla", "flash"),
        ({"framework": "torchtitan FSDP2", "dtype": "bf16"}, "pytorch", "flash"),
        ({"framework": "Meta internal", "dtype": "bf16"}, "other", "flash"),
    ],
)
def test_software_is_known_by_its_name_and_the_gpu_s_age(
    tmp_path: Path, cells: dict[str, str], software: str, attention: str
) -> None:
    (run,) = table(tmp_path, [{**ROW, **cells}]).runs
    assert (run.software, run.layout.attention) == (software, attention)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("8 x ConnectX-7 NDR 400 Gb/s a node", 50e9),
        ("NVL72; 400 Gb/s a GPU between racks", 50e9),
        ("1600 Gb/s a node (RoCE)", 25e9),
        ("InfiniBand, about 660 Gb/s a node measured", 660e9 / 64),
        ("3.2 Tb/s a node", 50e9),
        ("4 x EDR InfiniBand", 6.25e9),
        ("", 50e9),
    ],
)
def test_a_network_is_read_as_a_gpu_s_share_of_it(tmp_path: Path, text: str, rate: float) -> None:
    (run,) = table(tmp_path, [{**ROW, "network": text}]).runs
    assert run.system.network_bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        ({"layers": ""}, "sizes"),
        ({"gpu_type": "TPU v5"}, "TPU V5"),
        ({"vp": "", "pp_schedule": "chimera"}, "chimera"),
        ({"tokens_per_s_per_gpu_norm": ""}, "published"),
        ({"gpu_count": ""}, "GPUs"),
        ({"heads": "33"}, "heads"),
    ],
)
def test_rows_that_cannot_be_expressed_are_named(tmp_path: Path, cells: dict[str, str], word: str) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [*ROW, "pp_schedule"])
        writer.writeheader()
        writer.writerows([ROW, {**ROW, **cells}])
    found = transformer_runs.read_table(path)
    assert len(found.runs) == 1
    ((_, reason),) = found.left_out
    assert word in reason


def test_a_row_without_its_layout_gets_one_that_fits(tmp_path: Path) -> None:
    empty = dict.fromkeys(("dp", "tp", "pp", "vp", "micro_batch", "act_ckpt"), "")
    (run,) = table(tmp_path, [{**ROW, **empty, "dtype": "bf16"}]).runs
    assert run.layout.ranks == 32 and run.layout.global_batch == 64
    assert {"tp, pp", "micro_batch", "act_ckpt"} <= set(run.guessed)


_KEPT = ("row_id", "source_id", "family")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([key for key in ROW if key not in _KEPT]),
        st.sampled_from(["", "?", "n/a", "3", "0"]),
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
    cases = transformer_fit.cases_left_out(made)
    assert max(abs(case.error) for case in cases) < 0.05
    assert {case.run.family for case in cases} == {"one", "two", "three"}


def test_sweeps_have_kendall_s_tau_and_the_distance_from_the_best() -> None:
    sweep = transformer_fit.Sweep("a sweep", [4.0, 3.0, 2.0, 1.0], [4.0, 2.0, 3.0, 1.0])
    assert sweep.tau == pytest.approx(4 / 6) and sweep.short == 0
    other = transformer_fit.Sweep("another", [4.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    assert other.short == pytest.approx(0.25)
