"""The networks of composed scripts: what they return, whether they compute the loss, and which parts they have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import parallel
import torch
from composition import Composition
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import hpctrain as ht

CLASSES, IGNORED = 5, -100
# Those that take tokens.
SEQUENCES = ("transformer", "llama")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Output:
    """As the models of Hugging Face return."""

    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


class Network(nn.Module):
    """A chain of parts, the last of which computes logits."""

    output = recompute = ""
    loss_of: Loss | None = None

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        hidden = x
        for part in self.parts():
            hidden, x = x, self._computed(part, x)
        loss = None if y is None or self.loss_of is None else self.loss_of(x, y)
        if self.output == "tensor":
            return x if loss is None else loss
        found = Output(x, hidden, loss)
        if self.output == "dataclass":
            return found
        given = {name: value for name, value in vars(found).items() if value is not None}
        return given if self.output == "dict" else tuple(given.values())

    def _computed(self, part: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self.recompute in ("reentrant", "not reentrant") and x.requires_grad:
            return checkpoint(part, x, use_reentrant=self.recompute == "reentrant")
        return part(x)


class MLP(Network):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(OrderedDict(up=nn.Linear(10, 16), tanh=nn.Tanh(), down=nn.Linear(16, 8)))
        self.decoder = nn.Sequential(OrderedDict(up=nn.Linear(8, 12), tanh=nn.Tanh(), down=nn.Linear(12, CLASSES)))
        self.encoder.requires_grad_(not frozen)

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        yield from (self.encoder, self.decoder)


class Convnet(Network):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten())
        self.decoder = nn.Linear(64, CLASSES)
        self.encoder.requires_grad_(not frozen)

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        yield from (self.encoder, self.decoder)


class Transformer(Network, parallel.GPT):
    """With tied embeddings, unless they are frozen."""

    def __init__(self, *, frozen: bool) -> None:
        parallel.GPT.__init__(self, tied=not frozen, frozen=frozen)
        # The first of two stages has nothing to train then.
        self.blocks["1"].requires_grad_(not frozen)

    def shorten(self) -> None:
        """Leave out the blocks that only the stages of a pipeline need."""
        del self.blocks["1"], self.blocks["3"]

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))

    def parts(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        # A stage of a pipeline lacks some.
        if self.tokens is not None:
            yield self.embed
        yield from self.blocks.values()
        yield from (part for part in (self.norm, self.head) if part is not None)


class Llama(Network):
    """Computes its loss itself, as it does for everyone."""

    def __init__(self, *, frozen: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=parallel.VOCABULARY, pad_token_id=0, **sizes))
        self.llama.model.embed_tokens.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        found = self.llama(input_ids=x, labels=y, output_hidden_states=True, use_cache=False)
        if self.output == "tensor":
            return found.logits if y is None else found.loss
        given = {"logits": found.logits, "hidden": found.hidden_states[-1]}
        given |= {} if y is None else {"loss": found.loss}
        if self.output == "dataclass":
            return Output(**given)
        return given if self.output == "dict" else tuple(given.values())


_NETWORKS = {"llama": Llama, "mlp": MLP, "convnet": Convnet, "transformer": Transformer}


def network_of(composition: Composition, loss_of: Loss) -> Network:
    network = _NETWORKS[composition.network](frozen=composition.frozen).double()
    if isinstance(network, Transformer) and not composition.layout.schedule:
        network.shorten()
    network.output, network.recompute = composition.output, composition.recompute
    if composition.loss_inside:
        network.loss_of = loss_of
    return network


class Criterion:
    """The loss of a script, of logits and classes along the last dimension and of all others.

    Args:
        mean_loss: of a sum and its count.
        sum_loss: of a sum.
    """

    def __init__(self, composition: Composition, mean_loss: Loss, sum_loss: Callable[..., torch.Tensor]) -> None:
        classes = parallel.VOCABULARY if composition.network in SEQUENCES else CLASSES
        self._composition, self._mean_loss, self._sum_loss = composition, mean_loss, sum_loss
        self._weights = torch.linspace(0.5, 2, classes, dtype=torch.float64)
        self._given: dict[str, Any] = {
            "mean": {},
            "masked": {"ignore_index": IGNORED},
            "sum": {"reduction": "sum"},
            "weights": {"weight": self._weights},
        }[composition.loss]
        self._module = nn.CrossEntropyLoss(**self._given)

    def __call__(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self._composition.counted:
            return self._plain(logits, y)
        if self._composition.loss == "sum":
            return self._sum_loss(self.total(logits, y) * 0.02)
        return self._mean_loss(self.total(logits, y), self.count(y))

    def _plain(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits, y = logits.flatten(0, -2), y.flatten()
        if self._composition.loss_form == "module":
            loss = self._module(logits, y)
        else:
            loss = F.cross_entropy(logits, y, **self._given)
        return loss * 0.02 if self._composition.loss == "sum" else loss

    def total(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), **{**self._given, "reduction": "sum"})

    def count(self, y: torch.Tensor) -> torch.Tensor:
        return self._weights[y].sum() if self._composition.loss == "weights" else (y != IGNORED).sum()


def data_of(composition: Composition, samples: int, seed: int) -> TensorDataset:
    generator = np.random.default_rng(seed)
    numbers = np.arange(samples)
    if composition.network in SEQUENCES:
        tokens = torch.from_numpy(generator.integers(0, parallel.VOCABULARY, (samples, parallel.CONTEXT + 1)))
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        # Sequences of different length, each with a token to learn at least.
        masked = np.arange(parallel.CONTEXT) > numbers[:, None] % parallel.CONTEXT
    else:
        shape = (2, 6, 6) if composition.network == "convnet" else (10,)
        x = torch.from_numpy(generator.normal(size=(samples, *shape)))
        y, masked = torch.from_numpy(generator.integers(0, CLASSES, samples)), numbers % 4 == 3
    if composition.loss == "masked":
        y = torch.where(torch.from_numpy(masked), IGNORED, y)
    return TensorDataset(x, y)


def plan_of(composition: Composition) -> ht.ParallelPlan:
    layout, units = composition.layout, ["encoder", "decoder"]
    recompute = composition.recompute == "plan"
    if composition.network == "transformer":
        plan = parallel.plan_of(parallel.Case(dict(layout.sizes), recompute=recompute, zero=layout.zero))
        return replace(plan, shard=plan.shard if composition.units else [])
    if composition.network == "llama":
        units = ["LlamaDecoderLayer"]
    tensor = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()} if layout.size("tp") > 1 else {}
    return ht.ParallelPlan(
        shard=units if composition.units else [],
        recompute=units if recompute else [],
        tensor=tensor,
        zero=layout.zero,
    )
