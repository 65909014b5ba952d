"""The GPT against nanoGPT's formula written out, its initial weights against their distributions, and its size."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hpctrain.common.recipes.load import load_recipe  # noqa: E402
from hpctrain.common.recipes.sections import ModelSettings  # noqa: E402
from hpctrain.worker.models import build  # noqa: E402
from hpctrain.worker.models.torch_gpt import GPT  # noqa: E402
from hpctrain.worker.train.torch_rules import make_optimizer, parameter_kinds  # noqa: E402

SMALL = {"layers": 3, "heads": 4, "width": 24, "context": 10, "vocabulary": 31}


def gpt(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(ModelSettings(name="gpt", **{**SMALL, **changes}))


def plain(p: dict[str, torch.Tensor], x: torch.Tensor, heads: int, layers: int) -> torch.Tensor:
    """model.py of nanoGPT, lines 52 to 188, with its own softmax over a mask, one head and one sample at a time."""

    def norm(name, h):
        mean, variance = h.mean(-1, keepdim=True), h.var(-1, correction=0, keepdim=True)
        return (h - mean) / torch.sqrt(variance + 1e-5) * p[f"{name}.weight"] + p.get(f"{name}.bias", 0)

    def linear(name, h):
        return h @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def attention(name, h):
        q, k, v = (linear(f"{name}.{part}", h) for part in ("query", "key", "value"))
        size = h.shape[-1] // heads
        mixed = torch.zeros_like(h)
        for sample in range(len(h)):
            for head in range(heads):
                own = slice(head * size, (head + 1) * size)
                scores = q[sample, :, own] @ k[sample, :, own].T / math.sqrt(size)
                future = torch.ones_like(scores).triu(1).bool()
                weights = scores.masked_fill(future, -math.inf).exp()
                weights = weights / weights.sum(-1, keepdim=True)
                mixed[sample, :, own] = weights @ v[sample, :, own]
        return linear(f"{name}.output", mixed)

    def gelu(h):
        return h * (1 + torch.erf(h / math.sqrt(2))) / 2

    h = p["tokens.weight"][x] + p["positions.weight"][: x.shape[1]]
    for number in range(layers):
        block = f"blocks.{number}"
        h = h + attention(f"{block}.attention", norm(f"{block}.attention_norm", h))
        h = h + linear(f"{block}.mlp.down", gelu(linear(f"{block}.mlp.up", norm(f"{block}.mlp_norm", h))))
    return norm("norm", h) @ p["head.weight"].T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_the_formula(bias, tied):
    model = gpt(bias=bias, tied=tied).double()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and normalisations that could be left out unnoticed.
            parameter.add_(0.3 * torch.randn_like(parameter))
    x, y = torch.randint(31, (2, 7)), torch.randint(31, (2, 7))
    copies = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    if tied:
        copies["head.weight"] = copies["tokens.weight"]
    assert any(name.endswith("bias") for name in copies) == bias
    logits, expected = model(x), plain(copies, x, heads=4, layers=3)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for found in (logits, expected):
        torch.nn.functional.cross_entropy(found.flatten(0, 1), y.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-8, atol=1e-10, msg=name)


def test_a_rank_may_have_some_of_the_heads():
    model = gpt().double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    whole = model.blocks["0"].attention
    parts = 0
    for own in (slice(0, 6), slice(6, 24)):
        part = gpt().double().blocks["0"].attention
        for name in ("query", "key", "value"):
            getattr(part, name).weight = torch.nn.Parameter(getattr(whole, name).weight[own])
        part.output.weight = torch.nn.Parameter(whole.output.weight[:, own])
        parts = parts + part(x)
    torch.testing.assert_close(parts, whole(x))


def test_initial_weights_are_those_of_nanogpt():
    model = gpt(layers=2, width=256, vocabulary=500, context=300, bias=True, tied=False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
            continue
        deviation = 0.02 / math.sqrt(2 * 2) if name.endswith(("output.weight", "down.weight")) else 0.02
        count = parameter.numel()
        assert abs(parameter.mean()) < 5 * deviation / math.sqrt(count), name
        assert abs(parameter.std() / deviation - 1) < 5 / math.sqrt(2 * count), name
        assert abs((parameter.abs() < deviation).double().mean() - 0.6827) < 5 * 0.4655 / math.sqrt(count), name


def test_the_size_is_that_of_gpt2():
    settings = load_recipe("gpt2-124m").model
    with torch.device("meta"):
        sizes = {name: each.numel() for name, each in build(settings, "torch").named_parameters()}
    assert sum(sizes.values()) == settings.parameters
    # nanoGPT prints "number of parameters: 123.59M": without positions (model.py, lines 148 to 160).
    assert f"{(settings.parameters - sizes['positions.weight']) / 1e6:.2f}M" == "123.59M"
    # OpenAI's own: 50,257 tokens, and biases.
    theirs = settings.model_copy(update={"vocabulary": 50257, "bias": True})
    with torch.device("meta"):
        model = build(theirs, "torch")
    assert theirs.parameters == sum(each.numel() for each in model.parameters()) == 124_439_808


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(bias, tied):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    settings = ModelSettings(name="gpt", **{**SMALL, "bias": bias, "tied": tied})
    model = GPT(settings)
    x = torch.randint(31, (2, settings.context))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    # What is added to or multiplied with each number of a token is in N, and not in what torch counts.
    small = sum(each.numel() for each in model.parameters() if each.dim() == 1)
    assert counted.get_total_flops() == x.numel() * (settings.flops_per_token - 6 * small)
    whole = load_recipe("gpt2-124m").model
    assert 6 * 25 * 768 / whole.flops_per_token < 2e-4


def test_matrices_alone_are_decayed():
    recipe = load_recipe("gpt2-124m")
    model = gpt(bias=True)
    kinds = parameter_kinds(model)
    decays = {
        id(each): group["weight_decay"]
        for group in make_optimizer(recipe.optimizer, model).param_groups
        for each in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.1 if parameter.dim() >= 2 else 0.0), (name, kinds[name])
