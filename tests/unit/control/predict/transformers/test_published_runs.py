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


DEEPSPEED = {"framework": "Megatron-DeepSpeed", "gpu_type": "A100-80GB", "dtype": "bf16", "vp": "1"}

# Its embedding has a fifth of its parameters, or more where the head has weights of its own.
GEMMA = {"layers": "18", "heads": "8", "kv_heads": "1", "ffn": "16384", "vocab": "256128", "mlp": "geglu"}


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
        ({"gpu_count": "", "dp": ""}, "GPUs"),
        ({"gpu_count": "nan"}, "gpu_count"),
        ({"gpu_count": "30"}, "30 GPUs"),
        ({"tokens_per_s_per_gpu_norm": "-5"}, "tokens_per_s"),
        ({"tp": "5", "gpu_count": "40"}, "32 heads"),
        ({"cp": "-1"}, "cp"),
        ({"gpu_type": "A100-80GB"}, "fp8"),
        ({"zero_stage": "offload"}, "zero_stage"),
        ({"model": "Mixtral-8x7B"}, "mixture of experts"),
        ({"model": "Qwen", "n_params_b": "46.7"}, "46.7"),
        ({"model": "T5-11B"}, "network"),
        ({"framework": "NeMo LoRA"}, "frozen"),
        ({"gpu_count": "99999992", "dp": ""}, "dp_shard"),
        ({"seq_par": "64 GPUs"}, "seq_par"),
    ],
)
def test_rows_that_cannot_be_expressed_are_named(tmp_path: Path, cells: dict[str, str], word: str) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [*ROW, "pp_schedule", "zero_stage", "n_params_b", "seq_par"])
        writer.writeheader()
        writer.writerows([ROW, {**ROW, **cells}])
    found = transformer_runs.read_table(path)
    assert len(found.runs) == 1
    ((_, reason),) = found.left_out
    assert word in reason


@pytest.mark.parametrize(
    ("cells", "found", "completed"),
    [
        ({"act_ckpt": "Full (uniform, 1)"}, {"recomputation": "full"}, set()),
        ({"act_ckpt": "every 2 layers"}, {}, {"act_ckpt"}),
        ({"zero_stage": "ZeRO-3"}, {"zero": 3}, set()),
        ({"zero_stage": "3 (HSDP)"}, {"zero": 3}, set()),
        ({"pp_schedule": "1F1B-Interleaved"}, {"schedule": "interleaved_1f1b"}, set()),
        ({"dtype": "mixed"}, {"precision": "bf16"}, {"dtype"}),
        ({"micro_batch": "3"}, {"micro_batches": 5}, {"global_batch"}),
        ({"dp": "9"}, {}, {"dp"}),
        ({"zero_stage": "3", "dp_shard": "3"}, {}, {"dp_shard"}),
        ({"vocab": "", "ffn": "?", "seq_len": "n/a"}, {}, {"vocab", "ffn", "seq_len"}),
        ({"gpu_count": "1,024", "dp": "128", "global_batch": "1,024"}, {"ranks": 1024}, set()),
        ({"gpu_count": ""}, {"ranks": 32}, set()),
        ({"peak_mem_gb": "70%"}, {}, {"peak_mem_gb"}),
        ({"act_ckpt": "nothing_saveable"}, {"recomputation": "full"}, set()),
        ({"zero_stage": "distributed optimizer"}, {"zero": 1}, set()),
        ({"vp": "", "pp_schedule": "PipeDream-Flush"}, {"schedule": "1f1b"}, set()),
        ({"seq_par": "?"}, {"sequence_parallel": True}, set()),
        ({"heads": "", "hidden": "2560", "tp": "8", "dp": "2"}, {"ranks": 32}, {"heads"}),
        ({"gpu_type": "not stated", "dtype": "bf16"}, {}, {"gpu_type"}),
        ({"pp": "", "dp": "", "vp": "12"}, {"ranks": 32}, {"tp, pp"}),
        ({"framework": "in-house"}, {"zero": 0}, {"framework", "zero_stage"}),
        ({"framework": "torchtitan", "dtype": "bf16"}, {"kernels": "eager"}, {"compile", "zero_stage"}),
        ({"dp_replicate": "3", "zero_stage": "3"}, {"shards": 1}, {"dp_replicate"}),
        (DEEPSPEED | {"zero_stage": "1"}, {"zero": 1, "deepspeed_pipeline": True}, set()),
        (DEEPSPEED | {"zero_stage": "3"}, {"zero": 3, "deepspeed_pipeline": False}, set()),
        (DEEPSPEED | {"zero_stage": "1", "vp": "4"}, {"zero": 1, "deepspeed_pipeline": False}, set()),
        ({"model": "Gemma-2B", "hidden": "2048", "n_params_b": "2"} | GEMMA, {}, set()),
    ],
)
def test_cells_are_understood_in_many_words_or_named(
    tmp_path: Path, cells: dict[str, str], found: dict[str, object], completed: set[str]
) -> None:
    row = {**ROW, **cells}
    reader = transformer_runs._Reader(row)
    run = reader.run()
    assert {key: getattr(run.layout, key) for key in found} == found
    assert set(run.guessed) == completed
    assert run.tokens_per_s() > 0


@pytest.mark.parametrize(("model", "kind"), [("Llama-3-8B", "swiglu"), ("Qwen2.5-7B", "swiglu"), ("GPT 5B", "gelu")])
def test_an_mlp_that_is_not_stated_is_the_model_s(tmp_path: Path, model: str, kind: str) -> None:
    for unknown in ("", "?"):
        (run,) = table(tmp_path, [{**ROW, "model": model, "mlp": unknown}]).runs
        assert run.network.kind == kind and "mlp" in run.guessed


@pytest.mark.parametrize(
    ("delimiter", "end", "mark"), [(",", "\r\n", "\ufeff"), (";", "\r", ""), ("\t", "\n", "")], ids=repr
)
def test_files_of_other_programs_are_read(tmp_path: Path, delimiter: str, end: str, mark: str) -> None:
    lines = [delimiter.join(cells) for cells in (ROW, [f" {cell} " for cell in ROW.values()], [""] * len(ROW))]
    path = tmp_path / "runs.csv"
    path.write_bytes((mark + end.join(lines) + end).encode())
    found = transformer_runs.read_table(path)
    assert [run.tokens_per_s() for run in found.runs] == [table(tmp_path, [ROW]).runs[0].tokens_per_s()]
    assert not found.left_out


def test_a_row_with_more_cells_than_columns_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    # 1,024 without quotes shifts what follows.
    path.write_text(f"{','.join(ROW)}\n{','.join({**ROW, 'gpu_count': '1,024'}.values())}\n")
    found = transformer_runs.read_table(path)
    assert not found.runs and len(found.left_out) == 1


@pytest.mark.parametrize("header", ["1,2,3", "layers,tp,TP"])
def test_a_file_that_is_not_there_or_whose_columns_are_not_named_once_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(SystemExit):
        transformer_runs.read_table(path)
    path.write_text(f"{header}\n")
    with pytest.raises(SystemExit):
        transformer_runs.read_table(path)


@pytest.mark.parametrize("missing", [("row_id", "source_id", "family"), ("gpus_per_node", "network", "kv_heads")])
@pytest.mark.parametrize("families", [0, 1])
def test_few_rows_and_columns_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: tuple[str, ...], families: int
) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [key for key in ROW if key not in missing], extrasaction="ignore")
        writer.writeheader()
        writer.writerows([ROW] * families)
    for shipped in (False, True):
        transformer_fit.report(transformer_runs.read_table(path), shipped=shipped)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"all: {families} runs") and last.endswith("; memory: no peaks") and "nan" not in last


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
