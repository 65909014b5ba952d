"""Closed forms against real networks: parameters and FLOPs are equal, saved activations within a few per cent."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")


from hpctrain.common.recipes.gpt import GptSettings  # noqa: E402
from hpctrain.common.recipes.transformer import Transformer  # noqa: E402
from hpctrain.control.predict.transformers.layout import Layout  # noqa: E402
from hpctrain.control.predict.transformers.rank_memory import layer_activations  # noqa: E402
from hpctrain.worker.models.torch_gpt import GPT  # noqa: E402
from support.transformer_modules import Layer, Network  # noqa: E402

GPT2 = Transformer(layers=2, width=64, heads=4, kv_heads=4, mlp=256, vocabulary=101, context=48)
LLAMA = Transformer(
    layers=3,
    width=96,
    heads=6,
    kv_heads=2,
    mlp=200,
    vocabulary=90,
    context=64,
    kind="swiglu",
    norm="rmsnorm",
    positions="rotary",
    bias="none",
    tied=False,
)
BERT = replace(GPT2, layers=2, causal=False, other_rows=2)


def sized(network: Transformer, times: int) -> Transformer:
    """The same network with wider layers, more of them, and longer samples."""
    grown = {key: getattr(network, key) * times for key in ("layers", "width", "mlp", "context")}
    return replace(network, **grown, vocabulary=network.vocabulary + times)


KINDS = {
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied=False, bias="none"),
    "llama": LLAMA,
    "qwen": replace(LLAMA, bias="qkv", tied=True),
    "wide heads": replace(LLAMA, head_width=32),
    "bert": BERT,
}


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_real_modules(kind, times):
    sizes = sized(KINDS[kind], times)
    with torch.device("meta"):
        network = Network(sizes)
    assert sum(each.numel() for each in network.parameters()) == sizes.parameters.total
    assert sum(each.numel() for each in network.layers[0].parameters()) == sizes.parameters.layer


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_of_our_own_gpt(bias, times):
    settings = GptSettings(
        layers=2, heads=4 * times, width=64 * times, context=32 * times, vocabulary=97, bias=bias, tied=not bias
    )
    sizes = settings.transformer
    with torch.device("meta"):
        network = GPT(settings)
    assert sum(each.numel() for each in network.parameters()) == sizes.parameters.total == settings.parameters


def test_parts_are_those_of_modules():
    with torch.device("meta"):
        network = Network(LLAMA)
    parts = LLAMA.parameters
    layer = network.layers[0]
    for module, expected in (
        (layer.attention, parts.attention),
        (layer.mlp, parts.mlp),
        (network.tokens, parts.embedding),
        (network.norm, parts.final_norm),
        (network.head, parts.head),
    ):
        assert sum(each.numel() for each in module.parameters()) == expected


def saved_bytes(layer: torch.nn.Module, x: torch.Tensor) -> int:
    """The bytes of what a layer keeps for its backward pass, without its parameters."""
    own = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum()
    return sum(found.values())


LARGE = {
    "gpt2": Transformer(layers=1, width=256, heads=4, kv_heads=4, mlp=1024, vocabulary=101, context=256),
    "llama": replace(LLAMA, width=256, heads=8, kv_heads=2, mlp=704, context=256),
    "bert": replace(BERT, width=256, heads=4, kv_heads=4, mlp=1024, context=256),
}


@pytest.mark.parametrize("attention", ["flash", "materialised"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", LARGE)
def test_kept_activations_are_those_that_autograd_saves(kind, precision, attention):
    sizes = LARGE[kind]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    layer = Layer(sizes, materialised=attention == "materialised").to(dtype)
    x = torch.randn(3, sizes.context, sizes.width, dtype=dtype, requires_grad=True)
    layout = Layout(micro_batch=3, kernels="eager", precision=precision, attention=attention)
    expected = layer_activations(sizes, layout, sequence=sizes.context)
    if attention == "flash" and sizes.kv_heads < sizes.heads:
        # With fewer heads of keys, attention's output has another order in memory on CPUs, and is copied.
        expected += 3 * sizes.context * sizes.queries * dtype.itemsize
    assert saved_bytes(layer, x) / expected == pytest.approx(1, abs=0.015)


def test_dropout_keeps_masks():
    sizes = LARGE["gpt2"]
    layer = Layer(sizes, dropout=0.1, materialised=True)
    x = torch.randn(2, sizes.context, sizes.width, requires_grad=True)
    layout = Layout(micro_batch=2, kernels="eager", precision="float32", attention="materialised", dropout=True)
    # PyTorch's masks have 1 byte on GPUs, and 4 on CPUs.
    masks = 2 * sizes.context * (2 * sizes.width + sizes.heads * sizes.context)
    expected = layer_activations(sizes, layout, sequence=sizes.context) + 3 * masks
    assert saved_bytes(layer, x) / expected == pytest.approx(1, abs=0.015)


def test_the_formula_of_korthikanti():
    sizes = LARGE["gpt2"]
    layout = Layout(micro_batch=2, attention="materialised", dropout=True)
    s, h, a = sizes.context, sizes.width, sizes.heads
    assert layer_activations(sizes, layout, sequence=s) == 2 * s * h * (34 + 5 * a * s / h)
