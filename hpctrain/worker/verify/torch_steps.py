"""Records the steps of a PyTorch training: what its models get, its gradients and parameters."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from hpctrain.common.run.step_records import NAMELESS, Kept, projection
from hpctrain.worker.adapters.torch.batch.tensor import BatchTensor, running
from hpctrain.worker.adapters.torch.generators import device_generators
from hpctrain.worker.adapters.torch.optimizer_contents import optimizers_in, whole_of
from hpctrain.worker.adapters.torch.steps import with_closure
from hpctrain.worker.comm.after_import import change_after_import
from hpctrain.worker.verify.recorder import Recorder

Optimizer = torch.optim.Optimizer
_SHARDED_BACKWARD = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

# Wrappers of models, whose own names only one of two runs may have.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))


class TorchSteps:
    """Watches what a script or recipe does with PyTorch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0
        # The optimizer whose step is running, around any steps of optimizers within it, such as Lookahead's base.
        self._outer: Optimizer | None = None
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names = ParameterNames()
        # The projections of this rank's own gradients since the last step, by the parameter's id.
        self._own: dict[int, tuple[torch.Tensor, NDArray[np.float64]]] = {}
        self._generator = torch.Generator().manual_seed(0)

    def watch(self) -> None:
        """Begin to record."""
        self._watch_calls()
        if self._recorder.several:
            change_after_import({_SHARDED_BACKWARD: self._watch_sharded})
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # What models get.

    def _watch_calls(self) -> None:
        call: Callable[..., Any] = nn.Module._call_impl

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            self._before_call(module, args, kwargs)
            before = [each.get_state() for each in device_generators()]
            self._depth += 1
            try:
                returned = call(module, *args, **kwargs)
            finally:
                self._depth -= 1
            self._note_random(module, before)
            self._note_low(returned)
            return returned

        nn.Module._call_impl = recorded  # type: ignore[assignment, method-assign]

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._names.add(module)
        if module not in self._seen:
            self._seen.add(module)
            self._note_module(module)
        if torch.is_grad_enabled() and _trains(module):
            with contextlib.suppress(Exception):  # inputs of any kind, in any state
                self._note_samples(module, args, kwargs)

    def _note_module(self, module: nn.Module) -> None:
        facts = self._recorder.facts
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
                facts.own_statistics.append(f"{name} ({type(part).__name__})".lstrip())
        for parameter in module.parameters():
            self._recorder.computes_in(_dtype(parameter))
            if self._recorder.perturbs and not hasattr(parameter, "_hpctrain_verified"):
                self._perturb(parameter, self._recorder.perturbs)
            # A part may be called before the model that holds it.
            hooked = hasattr(parameter, "_hpctrain_hooked") or isinstance(parameter, DTensor)
            if self._recorder.several and parameter.requires_grad and not hooked:
                parameter._hpctrain_hooked = True  # type: ignore[attr-defined]
                parameter.register_hook(functools.partial(self._add_own, parameter))

    def _perturb(self, parameter: nn.Parameter, size: float) -> None:
        parameter._hpctrain_verified = True  # type: ignore[attr-defined]
        if not parameter.dtype.is_floating_point:
            return
        # Of a parameter that the ranks of a mesh divide one process has all.
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        noise = torch.rand(own.shape, generator=self._generator, dtype=torch.float64, device="cpu") * 2 - 1
        # By .data, since a script may have computed a penalty from them before it calls the model.
        own.data.mul_((1 + size * noise).to(own.device, own.dtype))

    def _add_own(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided or isinstance(gradient, DTensor):
            return
        _, values = projection(gradient.detach().reshape(-1), _numbers)
        before = self._own.get(id(parameter))
        self._own[id(parameter)] = parameter, values if before is None else before[1] + values

    def _watch_sharded(self, module: Any) -> None:
        """Note the gradients that FSDP2 reduces, of parameters whose hooks get none."""
        reduce = module.foreach_reduce

        def reduced(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            for each, gradient in zip(parameters, gradients, strict=True):
                self._add_own(each.sharded_param, gradient)
            return reduce(parameters, gradients, *args, **kwargs)

        module.foreach_reduce = reduced

    def _note_samples(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if running.tries or next(module.parameters(), None) is None:
            return  # a loss gets what models return
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            own = value.local if isinstance(value, BatchTensor) else value
            if running.rows is not None or own is not value:
                self._recorder.facts.batches = True
            received = running.asks and own.requires_grad  # from another stage of a pipeline
            if own.grad_fn is None and not received:
                self._recorder.samples(_numbers(own.detach()))
            return

    def _note_random(self, module: nn.Module, before: list[torch.Tensor]) -> None:
        """Note a model that has drawn random numbers while it trains."""
        names, name = self._recorder.facts.random, type(module).__name__
        trains = module.training and torch.is_grad_enabled()
        if trains and name not in names:
            now = (each.get_state() for each in device_generators())
            if not all(map(torch.equal, before, now)):
                names.append(name)

    def _note_low(self, value: Any) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._recorder.computes_in(str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for each in tree_leaves(value):
            if isinstance(each, torch.Tensor):
                self._recorder.computes_in(_dtype(each))
                if each.is_cuda and _rounds_products():
                    self._recorder.computes_in("tf32")

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._outer not in (None, optimizer) and optimizer in optimizers_in(self._outer):
            return None
        self._outer = optimizer
        self._gradients: list[Kept] = []

        def computed(closure: Callable[[], Any]) -> Any:
            """Compute the gradients, of which the first ones are kept: those of before are the last step's."""
            returned = closure()
            self._gradients = self._gradients or self._gradients_of(optimizer)
            return returned

        with_gradients = with_closure(args, kwargs, computed)
        if with_gradients is None:
            self._gradients = self._gradients_of(optimizer)
        return with_gradients

    def _gradients_of(self, optimizer: Optimizer) -> list[Kept]:
        return [_kept("gradient", name, each.grad) for name, each in self._of(optimizer) if each.grad is not None]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._outer is not optimizer:
            return
        self._outer = None
        parameters = list(self._of(optimizer))
        own = [
            Kept(kind="own", name=name, shape=tuple(each.shape), dtype=_dtype(each), norm=0.0, values=found[1])
            for name, each in parameters
            if (found := self._own.pop(id(whole_of(each)), None)) is not None
        ]
        kept = [*self._gradients, *(_kept("parameter", name, each) for name, each in parameters), *own]
        self._recorder.step(optimizer, kept)

    def _of(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        names = self._names.of([whole_of(each) for each in parameters])
        for each in parameters:
            yield names[whole_of(each)], each


def _trains(module: nn.Module) -> bool:
    """Whether a model is called to train it. Of a wrapper, what it holds says so."""
    return module.training or any(part.training for part in module.children())


def _rounds_products() -> bool:
    """Whether GPUs round what they multiply in float32 to TF32, which has the precision of float16."""
    cudnn: Any = torch.backends.cudnn
    products: Any = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        # From PyTorch 2.9 on. The older attribute cannot be read once a script has set this one.
        return any(each.fp32_precision == "tf32" for each in (cudnn.conv, cudnn.rnn, products))
    return bool(cudnn.allow_tf32 or products.allow_tf32)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _numbers(part: torch.Tensor) -> NDArray[Any]:
    real = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
    # A copy, since FSDP2 could not free the memory of a tensor that NumPy has seen.
    found: NDArray[Any] = real.to("cpu", torch.float64, copy=True).numpy()
    return found


def _kept(kind: str, name: str, tensor: torch.Tensor) -> Kept:
    """What is kept of a tensor; of one that ranks divide, the whole, which all of them put together."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if whole.layout != torch.strided:
        whole = whole.to_dense()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    norm, values = projection(whole.reshape(-1), _numbers)
    return Kept(kind=kind, name=name, shape=tuple(whole.shape), dtype=_dtype(whole), norm=norm, values=values)


class ParameterNames:
    """The name of each parameter in the first model that is called with it, and a number where several have one."""

    def __init__(self) -> None:
        # By the tensors themselves: what a script makes later may get the identity of what is gone.
        self._names: Any = WeakTensorKeyDictionary()
        self._places: dict[str, tuple[weakref.ref[Any], str]] = {}

    def add(self, model: nn.Module) -> None:
        """Take the names of a model that is called."""
        for name, parameter in model.named_parameters():
            if parameter not in self._names:
                self._names[parameter] = self._title(model, name)

    def of(self, parameters: list[torch.Tensor]) -> Mapping[torch.Tensor, str]:
        """The name of each; of one without a model, its place among them."""
        for place, each in enumerate(parameters):
            self._names.setdefault(each, f"{NAMELESS}{place}")
        names: Mapping[torch.Tensor, str] = self._names
        return names

    def _title(self, model: nn.Module, name: str) -> str:
        place, title, number = (weakref.ref(model), name), short_name(name), 2
        # One place has several parameters by turns under FSDP2: whole ones, and a rank's part.
        while self._places.setdefault(title, place) != place:
            title, number = f"{short_name(name)} ({number})", number + 1
        return title


def short_name(name: str) -> str:
    """A parameter's name without the names of what wraps its model."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)
