"""Published runs of transformers as predictions see them: a table of one run a row becomes networks and layouts.

What a row leaves out is completed, and named: sizes by what is usual, and of the layouts that fit the GPU's memory the
one that is expected to be fastest, since publishers print their best. Rows that contradict themselves, or that describe
another training than predictions know, are left out with the reason.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_regular
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.transformer import Transformer
from hpctrain.control.predict.transformers.layout import STATES, Layout
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import System, factors, step_file
from hpctrain.control.predict.transformers.step import Setup

Row = Mapping[str, str]

# Words of a table's GPU, most special first.
_GPUS = (
    ("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300"), ("B200", "b200"), ("H200", "h200"), ("H20", "h20"),
    ("H800", "h100-sxm"), ("H100", "h100-sxm"), ("A800", "a800"), ("A100", "a100-sxm-80"), ("MI300X", "mi300x"),
    ("V100", "v100-sxm"), ("L40S", "l40s"), ("A30", "a30"), ("P100", "p100"),
)  # fmt: skip
# Bytes a second of a GPU's share of a node's adapters where a row does not say: as nodes of each kind are sold.
_USUAL_NETWORK = {"v100": 6.25e9, "p100": 6.25e9, "a100": 25e9, "a800": 25e9, "b300": 100e9, "gb300": 100e9}
_LINKS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800, "OMNI-PATH": 100, "FDR": 56}

_SOFTWARE = (
    ("llm-foundry", "composer"), ("composer", "composer"), ("torchtitan", "pytorch"), ("torchao", "pytorch"),
    ("nemo", "nemo"), ("bridge", "nemo"), ("megatron-core", "nemo"), ("megatron-deepspeed", "megatron-deepspeed"),
    ("deepspeed", "deepspeed"), ("megatron", "megatron-lm"), ("pax", "xla"), ("maxtext", "xla"), ("jax", "xla"),
    ("xla", "xla"), ("internlm", "internlm"),
    ("internevo", "internlm"), ("libai", "oneflow"), ("oneflow", "oneflow"), ("llm.c", "llm.c"),
    ("flash-attention", "flash-attention"), ("colossal", "colossal-ai"), ("lit-gpt", "pytorch"), ("fsdp", "pytorch"),
    ("nanotron", "pytorch"), ("pytorch", "pytorch"),
)  # fmt: skip
_FUSED = ("nemo", "megatron-lm", "xla", "llm.c", "flash-attention")
_SEQUENCE_PARALLEL = ("nemo", "megatron-lm", "pytorch", "other")
_INTERLEAVING = ("nemo", "megatron-lm", "other")
_UNKNOWN = ("?", "n/a", "na", "none", "unknown")
# NeMo reduces gradients in bf16 (grad_reduce_in_fp32=False in pretrain.py of
# https://github.com/mlcommons/training_results_v5.0, and in its recipes for performance).
_STATES = {"nemo": "megatron_bf16_gradients", "megatron-lm": "megatron", "internlm": "narrow", "deepspeed": "narrow"}
# In small letters, without what is between words.
_SCHEDULES = {
    "": "1f1b", "1f1b": "1f1b", "gpipe": "gpipe", "afab": "gpipe", "interleaved": "interleaved_1f1b",
    "interleaved1f1b": "interleaved_1f1b", "1f1binterleaved": "interleaved_1f1b", "noninterleaved": "1f1b",
    "pipedreamflush": "1f1b",
}  # fmt: skip
# By the first word; JAX's policies are named by what they save.
_RECOMPUTATION = {
    "none": "none", "no": "none", "off": "none", "false": "none", "everything": "none", "full": "full",
    "nothing": "full", "minimal": "selective", "selective": "selective", "save": "matmuls",
}  # fmt: skip
_KINDS = (("allocated", "allocated"), ("reserved", "reserved"), ("nvidia-smi", "used"))
_YES = ("yes", "true", "1", "on")
_NO = ("no", "false", "0", "off")
_PRECISIONS = (
    ("fp4", "fp4"), ("fp8", "fp8"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"),
    ("fp32", "float32"), ("float32", "float32"),
)  # fmt: skip
# Words of a model or a framework that make another training of it.
_OTHERS = (
    (r"\d+x\d+(\.\d+)?b|moe|mixtral|dbrx|grok|deepseek-?v[23]|\ba\d+(\.\d+)?b\b", "a mixture of experts"),
    (r"lora|peft", "parameters besides frozen ones are trained"),
    (r"\b(u?l?m?t5|flan|bart|mamba|rwkv|vit|unet)\b", "no network of equal layers of attention and an MLP"),
)
# Models whose MLP has a gate.
_GATED = r"llama|mistral|qwen|internlm|baichuan|gemma|\byi\b"
# How far printed parameters may be from those of the printed sizes, with or without the embedding.
_PARAMETERS = 1.5
_COLUMNS = ("row_id", "source_id", "family", "model", "gpu_type", "framework", "printed_gb")
_VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 10, 12)
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Of a GPU's memory, for what a layout needs in all.
_USABLE = 0.97
# The limit for a table: 10,000 rows have about 3 MB.
_MOST_BYTES = 1 << 28
# Columns that say nothing about how a run was laid out.
_FIGURES = {"row_id", "tokens_per_s_per_gpu_norm", "peak_mem_gb", "peak_mem_kind", "fits", "memory_gib", "printed_gb"}
# What :meth:`_Reader.layout` found and completed, by the other cells.
_CHOSEN: dict[frozenset[tuple[str, str]], tuple[Layout, list[str]]] = {}


class NotExpressedError(Exception):
    """A row that predictions cannot say anything about, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        measured: tokens a second and GPU; None where only memory was published.
        peak: bytes at the peak, and of which ``kind``.
        guessed: columns that were completed.
        assumed_gpu: the row does not say which GPU, so only ratios count.
        fits: whether it ran; None for a table that does not have runs which did not.
        room: bytes of a GPU.
    """

    row: Row
    family: str
    software: str
    network: Transformer
    layout: Layout
    system: System
    measured: float | None
    peak: float | None = None
    kind: str = ""
    guessed: tuple[str, ...] = ()
    assumed_gpu: bool = False
    fits: bool | None = None
    room: float = 0.0

    @property
    def name(self) -> str:
        """The row's name."""
        return self.row["row_id"]

    @property
    def training(self) -> tuple[object, ...]:
        """All that a prediction depends on."""
        system = self.system
        return self.network, self.layout, self.software, system.name, system.joined, system.network_bytes_per_s

    def tokens_per_s(self, constants: Mapping[str, float] | None = None) -> float:
        """Predicted tokens a second and GPU."""
        step = self.setup.step if constants is None else self.setup.predicted(constants)
        return step.tokens_per_s / self.layout.ranks

    @property
    def terms(self) -> Mapping[str, float]:
        """Seconds by cause."""
        return self.setup.step.terms

    @cached_property
    def setup(self) -> Setup:
        """What is predicted."""
        return Setup(self.network, self.layout, self.system, self.software)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs a token of forward and backward pass, a multiply-add being 2, causal attention halved."""
        network = self.network
        projections = 4 * network.width * (network.queries + network.keys)
        scores = 4 * network.attended(network.context) * network.queries
        mlp = 2 * network.matrices * network.width * network.mlp
        head = 2 * network.width * (network.vocabulary + (0 if network.causal else network.width))
        return 3 * (network.layers * (projections + scores + mlp) + head)


@dataclass(frozen=True)
class Table:
    """The runs of a file, and why other rows are not among them."""

    runs: tuple[Run, ...]
    left_out: tuple[tuple[Row, str], ...] = field(default=())


def read_table(path: Path) -> Table:
    """All rows of a file, whose cells are apart by commas, semicolons or tabs."""
    runs, left_out = [], []
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from error
    header = next(io.StringIO(text, newline=""), "")
    csv.field_size_limit(len(text) + 1)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count))
    columns = [name.strip().lower() for name in next(rows, [])]
    if "layers" not in columns:
        raise SystemExit(f"{path}: the first line names no column `layers`; it names {', '.join(columns) or 'none'}")
    if twice := sorted({name for name in columns if name and columns.count(name) > 1}):
        raise SystemExit(f"{path}: the first line names {', '.join(twice)} more than once")
    for number, cells in enumerate(rows, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        reader = _Reader(dict(zip(columns, cells, strict=False)), number)
        try:
            if any(cell.strip() for cell in cells[len(columns) :]):
                raise NotExpressedError(f"it has {len(cells)} cells, and the first line names {len(columns)} columns")
            runs.append(reader.run())
        except NotExpressedError as reason:
            left_out.append((reader.row, str(reason)))
        except HpctrainError as error:
            left_out.append((reader.row, error.message))
        except ValidationError as error:
            left_out.append((reader.row, "; ".join(f"{each['loc']}: {each['msg']}" for each in error.errors())))
    return Table(tuple(runs), tuple(left_out))


def read_row(row: Row) -> Run:
    """One row of a table, by the names of its columns.

    Raises:
        NotExpressedError: predictions cannot say anything about it.
        HpctrainError: its sizes do not fit each other.
    """
    return _Reader(row).run()


class _Reader:
    """One row.

    Args:
        number: that it has in its file.
    """

    def __init__(self, row: Row, number: int = 0) -> None:
        self.row = {**dict.fromkeys(_COLUMNS, ""), **{key: value.strip() for key, value in row.items()}}
        self.row["row_id"] = self.row["row_id"] or f"row {number}"
        self.row["family"] = self.row["family"] or self.row["source_id"] or "not stated"
        self.guessed: list[str] = []

    def text(self, key: str) -> str:
        """A cell in small letters."""
        return self.row.get(key, "").lower()

    def stated(self, key: str) -> str:
        """The same, empty where a word says that it is unknown."""
        text = self.text(key)
        return "" if text in _UNKNOWN or text.startswith("not ") else text

    def number(self, key: str) -> float | None:
        """A cell's number, which may have commas between thousands; None where it is empty, unknown or 0.

        Raises:
            NotExpressedError: it is something else.
        """
        text = self.stated(key)
        if not text:
            return None
        plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text
        try:
            found = float(plain)
        except ValueError:
            found = math.nan
        if not 0 <= found < math.inf:
            raise NotExpressedError(f"{key} is {text!r}")
        return found or None

    def count(self, key: str) -> int | None:
        """A cell's whole number; see :meth:`number`.

        Raises:
            NotExpressedError: it is none.
        """
        found = self.number(key)
        if found is not None and not found.is_integer():
            raise NotExpressedError(f"{key} is {self.text(key)!r}")
        return None if found is None else int(found)

    def peak(self) -> float | None:
        """Bytes at the peak; a cell that is no number does not keep the time from being predicted."""
        try:
            found = self.number("peak_mem_gb")
        except NotExpressedError:
            self.guessed.append("peak_mem_gb")
            return None
        kind = self.text("peak_mem_kind")
        return None if found is None else found * (2**30 if "gib" in kind or "mib" in kind else 1e9)

    def run(self) -> Run:
        """The run of this row.

        Raises:
            NotExpressedError: it has neither time nor memory, or too little is known about it.
        """
        for word, reason in _OTHERS:
            if re.search(word, f"{self.text('model')} {self.text('framework')}"):
                raise NotExpressedError(reason)
        measured, peak = self.number("tokens_per_s_per_gpu_norm"), self.peak()
        fits = {"yes": True, "no": False}.get(self.text("fits"))
        if measured is None and peak is None and fits is None:
            raise NotExpressedError("neither time nor memory was published")
        if not self.ranks:
            raise NotExpressedError("the number of GPUs is not stated")
        layout = self.layout()
        kind = self.text("peak_mem_kind")
        return Run(
            row=self.row,
            family=self.row["family"],
            software=self.software,
            network=self.network,
            layout=layout,
            system=self.system,
            measured=measured,
            peak=peak,
            kind=next((each for word, each in _KINDS if word in kind), "not stated"),
            guessed=tuple(dict.fromkeys(self.guessed)),
            assumed_gpu=not self.stated("gpu_type"),
            fits=fits,
            room=(self.number("memory_gib") or 0) * 2**30 or gpu(self.gpu).memory_bytes,
        )

    @cached_property
    def ranks(self) -> int:
        """All GPUs."""
        stated = self.count("gpu_count")
        sizes = [self.count(key) for key in ("dp", "tp", "pp")]
        return stated or math.prod(size or 0 for size in sizes) * (self.count("cp") or 1)

    @cached_property
    def software(self) -> str:
        """What trained."""
        name = self.stated("framework")
        found = next((known for word, known in _SOFTWARE if word in name), "other")
        if found == "other":
            self.guessed.append("framework")
        # Before Hopper, Megatron-LM had neither Transformer Engine nor sequence parallelism by default.
        old = found == "megatron-lm" and self.gpu.startswith(("a", "v", "p"))
        return "megatron-deepspeed" if old and "flash" not in name else found

    @cached_property
    def gpu(self) -> str:
        """The GPU's name in gpus.yaml."""
        printed = self.stated("gpu_type").upper()
        if not printed:
            self.guessed.append("gpu_type")
            # The oldest that has the precision.
            oldest = (("fp4", "b200"), ("fp8", "h100-sxm"), ("bf", "a100-sxm-80"))
            return next((name for word, name in oldest if word in self.text("dtype")), "v100-sxm")
        # GH200 is no H200, and A300 no A30; 8xH100 is one.
        found = next((name for word, name in _GPUS if re.search(rf"(?<![A-WYZ]){word}(?!\d)", printed)), None)
        if found is None:
            raise NotExpressedError(f"no data sheet of {printed}")
        if found.startswith("a100"):
            pcie = "PCI" in printed
            size = "40" if "40" in printed else "80"
            return f"a100-{'pcie' if pcie else 'sxm'}-{size}"
        return "h100-pcie" if found == "h100-sxm" and "PCI" in printed else found

    @cached_property
    def system(self) -> System:
        """GPUs and network."""
        per_node = self.count("gpus_per_node") or 8
        if self.ranks > per_node and not self.count("gpus_per_node"):
            self.guessed.append("gpus_per_node")
        return System.of(self.gpu, gpus_per_node=per_node, network_bytes_per_s=self.network_rate(per_node))

    def network_rate(self, per_node: int) -> float:
        """Bytes a second of a GPU's share of the adapters."""
        text = self.row.get("network", "").upper()
        stated = _stated_rate(text, per_node)
        if not stated and self.ranks > per_node:
            self.guessed.append("network")
        return stated or _USUAL_NETWORK.get(self.gpu.partition("-")[0], 50e9)

    @cached_property
    def network(self) -> Transformer:
        """The transformer."""
        layers, width, heads = self.count("layers"), self.count("hidden"), self.count("heads")
        if not layers or not width:
            raise NotExpressedError("the sizes of the network are not stated")
        if not heads:
            self.guessed.append("heads")
            # Of 128 numbers, and as many as tp and the heads of keys and values divide.
            unit = math.lcm(self.count("tp") or 1, self.count("kv_heads") or 1)
            heads = unit * max(1, round(width / 128 / unit))
        mlp = self.stated("mlp")
        if mlp and not re.search("lu|mlp", mlp):
            raise NotExpressedError(f"mlp is {mlp!r}")
        gated = bool(re.search("glu|silu", mlp) if mlp else re.search(_GATED, self.text("model")))
        usual = {"vocab": 32000 if gated else 51200, "ffn": 4 * width, "seq_len": 2048}
        stated = {key: self.count(key) for key in usual}
        self.guessed += [key for key, value in stated.items() if value is None]
        if not mlp:
            self.guessed.append("mlp")
        if gated and not self.count("kv_heads"):
            self.guessed.append("kv_heads")
        if not self.stated("model"):
            self.guessed.append("model")
        bert = "bert" in self.text("model")
        found = Transformer(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=self.count("kv_heads") or heads,
            mlp=stated["ffn"] or usual["ffn"],
            vocabulary=stated["vocab"] or usual["vocab"],
            context=stated["seq_len"] or usual["seq_len"],
            kind="swiglu" if gated else "gelu",
            norm="rmsnorm" if gated else "layernorm",
            positions="rotary" if gated else "learned",
            bias="none" if gated else "all",
            tied=not gated,
            causal=not bert,
            head_width=0 if width % heads == 0 else 128,
        )
        printed, made = self.number("n_params_b"), found.parameters.total / 1e9
        layers_alone = found.layers * found.parameters.layer / 1e9
        if printed and not layers_alone / _PARAMETERS < printed < made * _PARAMETERS:
            raise NotExpressedError(f"its sizes make {made:.3g} billion parameters, {printed:g} are printed")
        return found

    # The layout.

    def layout(self) -> Layout:
        """The layout of this row.

        Raises:
            NotExpressedError: there is none.
        """
        # Tables have many rows of few trainings.
        cells = frozenset(item for item in self.row.items() if item[0] not in _FIGURES)
        if cells not in _CHOSEN:
            known = len(self.guessed)
            layouts = list(self.layouts())
            if not layouts:
                raise NotExpressedError("no layout divides the GPUs, the heads and the batch")
            _CHOSEN[cells] = self.chosen(layouts), self.guessed[known:]
        found, guessed = _CHOSEN[cells]
        self.guessed += guessed
        return found

    def chosen(self, layouts: list[Layout]) -> Layout:
        """Of the layouts that a row allows, the fastest that fits the memory."""
        if len(layouts) == 1:
            return layouts[0]
        room = gpu(self.gpu).memory_bytes * _USABLE
        prior = {name: each.prior for name, each in step_file().constants.items()}
        prior |= factors({})
        fastest = sorted(
            layouts,
            key=lambda each: (
                # What is not stated is divided only where it does not fit otherwise.
                each.zero if "zero_stage" in self.guessed else 0,
                Setup(self.network, each, self.system, self.software).predicted(prior).seconds / each.global_batch,
            ),
        )
        fitting = (each for each in fastest if memory(self.network, each).used <= room)
        return next(fitting, layouts[-1])

    @cached_property
    def precision(self) -> str:
        """Of matrix products."""
        text, flops = self.text("dtype"), self.system.flops
        named = [found for word, found in _PRECISIONS if word in text]
        if named:
            # The last is refused where the GPU has none.
            self.system.peak(found := next((each for each in named if each in flops), named[-1]))
            return found
        if self.stated("dtype") and not re.search("16|amp|mixed|half", text):
            raise NotExpressedError(f"the precision {text}")
        self.guessed.append("dtype")
        if not self.stated("dtype") and self.software == "nemo" and "fp8" in flops:
            return "fp8"
        return "bf16" if "bf16" in flops else "fp16"

    @cached_property
    def zero(self) -> int:
        """What data-parallel ranks divide."""
        stated = self.stated_zero
        if self.software == "composer" or (not stated and (self.count("dp_shard") or 1) > 1):
            return 3
        if stated is not None:
            return stated
        if self.software in ("nemo", "megatron-lm"):
            return 1
        if "fsdp" in self.text("framework"):
            return 3
        self.guessed.append("zero_stage")
        return 0

    def stages(self, pp: int) -> tuple[int, ...]:
        """The stages of ZeRO that a mesh may have; pipelines with the last one are rare."""
        stage = self.zero
        if "zero_stage" not in self.guessed:
            return (stage,)
        return (0, 1) if pp > 1 else (0, 1, 3)

    @cached_property
    def stated_zero(self) -> int | None:
        """The stage of ZeRO by a number or a name: ``3``, ``ZeRO-1``, ``FSDP``, Megatron-LM's distributed optimizer."""
        text = self.stated("zero_stage")
        if not text:
            return None
        if text == "distributed optimizer":
            return 1
        found = re.search(r"(?<![\d.])[0-3](?!\d)", text)
        if found or text in ("fsdp", "hsdp"):
            return int(found[0]) if found else 3
        raise NotExpressedError(f"zero_stage is {text!r}")

    def meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """tp, pp, cp and the zero stage: as stated, or all that could be."""
        tp, pp, cp = self.count("tp"), self.count("pp"), self.count("cp") or 1
        self.guessed += [] if self.count("cp") else ["cp"]
        if tp and pp:
            yield from ((tp, pp, cp, zero) for zero in self.stages(pp))
            return
        self.guessed.append("tp, pp")
        per_node, turns = min(8, self.system.joined), self.count("vp") or 1
        for width, depth in itertools.product(
            [tp] if tp else [each for each in (1, 2, 4, 8) if each <= per_node],
            [pp] if pp else [each for each in (1, 2, 4, 8, 16, 32) if each * turns <= self.network.layers],
        ):
            if self.ranks % (width * depth * cp) == 0 and self.network.heads % width == 0:
                yield width, depth, cp, self.zero
        if not tp and not pp and self.zero < 3:
            yield 1, 1, cp, 3

    def layouts(self) -> Iterator[Layout]:
        """All layouts that a row allows."""
        for tp, pp, cp, zero in self.meshes():
            data = self.data_ranks(tp, pp, cp)
            shard = min(self.count("dp_shard") or data // (self.count("dp_replicate") or 1), data) if zero else 1
            if not shard or data % shard:
                self.guessed.append("dp_shard")
                shard = data
            if self.count("dp_replicate") not in (None, data // shard):
                self.guessed.append("dp_replicate")
            common = {
                **self.common(tp, pp),
                "mesh": Mesh(dp_replicate=data // shard, dp_shard=shard, pp=pp, cp=cp, tp=tp),
                # Ranks along cp divide state too.
                "zero": zero if zero == 3 or shard * cp > 1 else 0,
                "gradient_buffer": zero < 3,
            }
            for (batch, count), (schedule, turns), how in itertools.product(
                self.batches(data, pp), self.schedules(pp), self.recomputations()
            ):
                yield Layout(
                    **common,
                    micro_batch=batch,
                    micro_batches=count,
                    schedule=schedule,
                    virtual_stages=turns,
                    recomputation=how,
                    deepspeed_pipeline=self.deepspeed and common["zero"] < 2 and schedule == "1f1b",
                )

    def data_ranks(self, tp: int, pp: int, cp: int) -> int:
        """The data-parallel ranks.

        Raises:
            NotExpressedError: the mesh divides neither the GPUs nor the network.
        """
        data, rest = divmod(self.ranks, tp * pp * cp)
        if rest or not data:
            raise NotExpressedError(f"tp {tp} x pp {pp} x cp {cp} does not divide {self.ranks} GPUs")
        if self.network.heads % tp:
            raise NotExpressedError(f"tp {tp} does not divide {self.network.heads} heads")
        # Megatron-LM may count embedding and head as a layer each.
        if pp * (self.count("vp") or 1) > self.network.layers + 2 * (pp > 1):
            raise NotExpressedError(f"pp {pp} x vp {self.count('vp') or 1} is more than {self.network.layers} layers")
        if self.count("dp") not in (None, data, data * cp):
            self.guessed.append("dp")
        return data

    def common(self, tp: int, pp: int) -> dict[str, Any]:
        """What all layouts of a row have in common."""
        if self.software == "pytorch" and not self.stated("compile"):
            self.guessed.append("compile")
        return {
            # Stages of a pipeline keep gathered parameters between micro-batches (torchtitan, reshard_after_forward).
            "reshard": self.stated_zero != 2 and pp == 1,
            "sequence_parallel": self.sequence_parallel and tp > 1,
            "asynchronous_tp": self.software == "nemo" and self.sequence_parallel and tp > 1,
            "attention": "flash" if self.flash else "materialised",
            "precision": self.precision,
            "state": STATES[self.state],
            "kernels": "fused" if self.software in _FUSED or self.text("compile") in _YES else "eager",
            # --attention-dropout and --hidden-dropout are 0.1 unless a script says otherwise (megatron/arguments.py).
            "dropout": not self.flash and "megatron" in self.text("framework") and self.network.kind == "gelu",
        }

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed trains Megatron-LM's network; Megatron-LM alone has the same ``software`` on old GPUs."""
        return self.software == "megatron-deepspeed" and "deepspeed" in self.text("framework")

    @property
    def state(self) -> str:
        """How many bytes a parameter's state has."""
        if self.software == "composer":
            return "bf16" if "pure" in self.text("dtype") else "float32"
        if self.software == "megatron-deepspeed":
            narrow = "deepspeed_bf16" if self.deepspeed and self.zero == 1 else "megatron"
            return {"fp16": "megatron_fp16", "float32": "float32"}.get(self.precision, narrow)
        return _STATES.get(self.software, "float32")

    @property
    def sequence_parallel(self) -> bool:
        """Megatron's; software that is newer than it has it whether or not a row says so."""
        stated = self.stated("seq_par")
        if stated not in ("", *_YES, *_NO):
            raise NotExpressedError(f"seq_par is {stated!r}")
        return stated in _YES or (not stated and self.software in _SEQUENCE_PARALLEL)

    @property
    def flash(self) -> bool:
        """Whether attention is one kernel."""
        framework, told = self.text("framework"), f"{self.text('framework')} {self.text('notes')}"
        if "flash" in told:
            return True
        if "pax" in framework:
            return "te" in self.text("dtype").split()
        old = self.software == "deepspeed" and self.gpu.startswith(("a", "v", "p"))
        return not old and self.software not in ("megatron-deepspeed", "oneflow")

    def batches(self, data: int, pp: int) -> Iterator[tuple[int, int]]:
        """Samples of a micro-batch, and micro-batches."""
        batch, count, whole = self.count("micro_batch"), self.count("grad_accum"), self.number("global_batch")
        share = max(1, round(whole / data)) if whole else None
        if whole and share and (share % (batch or 1) or share != whole / data):
            self.guessed.append("global_batch")
        if batch and (share or count):
            yield batch, max(1, round(share / batch)) if share else count or 1
        elif count and share:
            yield max(1, round(share / count)), count
        else:
            self.guessed.append("micro_batch" if not batch else "global_batch")
            share = share or (batch or 1) * max(8, 4 * pp)
            for each in [batch] if batch else _MICRO_BATCHES:
                if share % each == 0:
                    yield each, share // each

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedule and virtual stages."""
        text, turns = re.sub("[^a-z0-9]", "", self.stated("pp_schedule")), self.count("vp") or 1
        if pp > 1 and text not in _SCHEDULES:
            raise NotExpressedError(f"the schedule {self.text('pp_schedule')}")
        schedule = _SCHEDULES.get(text, "1f1b")
        if pp == 1:
            yield "1f1b", 1
        elif turns > 1:
            yield schedule if schedule not in ("1f1b", "gpipe") else "interleaved_1f1b", turns
        elif schedule not in ("1f1b", "gpipe"):
            self.guessed.append("vp")
            yield from ((schedule, each) for each in _VIRTUAL_STAGES if self.network.layers >= pp * each)
        else:
            yield schedule, 1
            if not self.count("vp") and not text and self.software in _INTERLEAVING:
                self.guessed.append("vp")
                for each in _VIRTUAL_STAGES:
                    if self.network.layers >= pp * each:
                        yield "interleaved_1f1b", each

    def recomputations(self) -> Iterator[str]:
        """What the backward pass computes again."""
        text = self.text("act_ckpt")
        if text != "none" and not self.stated("act_ckpt"):
            # What fits without is not recomputed.
            self.guessed.append("act_ckpt")
            yield from ("none", "selective", "matmuls", "full")
        elif self.software == "pytorch" and text.startswith("selective"):
            if "op" not in text.split():
                # Such as every second layer.
                self.guessed.append("act_ckpt")
            yield "matmuls"
        else:
            known = _RECOMPUTATION.get(re.split("[^a-z]", text)[0])
            if known is None:
                self.guessed.append("act_ckpt")
            yield from [known] if known else ("selective", "full")


def _stated_rate(text: str, per_node: int) -> float:
    """Bytes a second of a GPU's share of a network in words; 0 where they do not say."""
    if found := re.search(r"(\d+(?:\.\d+)?) ?GB/S A GPU", text):
        return float(found[1]) * 1e9 / 8
    if found := re.search(r"(\d+) ?X [^;,]*?(\d+) ?GB", text):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / per_node
    if found := re.search(r"(\d+(?:\.\d+)?) ?([GT])B/S A NODE", text):
        return float(found[1]) * (1e9 if found[2] == "G" else 1e12) / 8 / per_node
    if found := re.search(r"(\d+) ?X (?:\w+ )*?(EDR|HDR|NDR|XDR|FDR|OMNI-PATH)", text):
        return int(found[1]) * _LINKS[found[2]] * 1e9 / 8 / per_node
    return 0.0
