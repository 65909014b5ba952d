"""Which keys of a recipe have an effect beside its others, and which cannot be combined, whatever ranks there are."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

from hpctrain.common.errors import InvalidValueError
from hpctrain.common.recipes.mesh import FILL, Axis, Pipeline, Sharding
from hpctrain.common.recipes.optimizers import UPDATE_RULES

if TYPE_CHECKING:
    from hpctrain.common.recipes.schedule import Schedule
    from hpctrain.common.recipes.sections import Optimizer, RecipeKeys

MODEL_AXES: Mapping[str, tuple[Axis, ...]] = {
    "digits_cnn": (),
    "resnet18": (),
    "resnet50": (),
    "resnet101": (),
    "gpt": ("pp", "tp"),
}
"""The axes besides dp_replicate and dp_shard that each model can be divided along; with ``pp`` it has blocks."""

_WITHOUT: Mapping[Axis, str] = {
    "pp": "has no blocks to make stages of",
    "cp": "has no attention that divides sequences",
    "tp": "has no plan by which its layers are divided",
}
# Schedules that compute the gradients of weights later than those of inputs.
_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv")
_RESIDUAL = ("resnet18", "resnet50", "resnet101")
_Owners = tuple[tuple[str, str, Mapping[str, str]], ...]
# A section, the key that decides which kind it is of, and the keys of each kind, which are refused for other kinds.
OWN_KEYS: _Owners = (
    (
        "optimizer",
        "optimizer.name",
        {name: rule.keys for name, rule in UPDATE_RULES.items()},
    ),
    (
        "schedule",
        "schedule.name",
        {
            "step": "milestones gamma",
            "piecewise": "milestones factors",
            "polynomial": "power decay_steps decay_from warmup_steps end_rate",
            "cosine": "decay_steps decay_from warmup_steps end_rate",
            "triangular": "end_rate peak_epoch",
        },
    ),
    ("images.augmentation", "images.augmentation.name", {"rand_augment_increasing": "layers magnitude deviation"}),
    ("sync", "sync.mode", {"local": "after_epochs outer", "async": "rule moving_rate staleness"}),
    ("sync", "sync.rule", {"easgd": "moving_rate"}),
    ("sync.outer", "sync.outer.optimizer", {"nesterov": "learning_rate momentum"}),
    (
        "model",
        "model.name",
        {
            **dict.fromkeys(_RESIDUAL, "classes new_head zero_gamma weights batch_norm"),
            "gpt": "layers heads width context vocabulary bias tied",
        },
    ),
    ("", "loss", {"binary_cross_entropy": "target_threshold"}),
    ("", "model.name", {"digits_cnn": "mixing", **dict.fromkeys(_RESIDUAL, "stochastic_depth mixing")}),
)
# The same, but a kind's keys may stay where --set names another one.
IDLE_KEYS: _Owners = (
    ("", "data.name", {"imagenet": "images"}),
    (
        "data",
        "data.name",
        {
            "digits": "test_fraction split_seed",
            "imagenet": "limit workers decode repeats broken_images path",
            "text": "path epoch_samples",
        },
    ),
)


def used_values(work: BaseModel) -> dict[str, Any]:
    """The values of a recipe by key, without defaults that mean "none" and those of keys that have no effect.

    What is left is the same recipe when it is read again: only defaults are left out.
    """
    return _used(work, work, "")


def _used(work: BaseModel, section: BaseModel, prefix: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    fields = type(section).model_fields
    for key, dumped in section.model_dump(mode="json").items():
        value, path = getattr(section, key), f"{prefix}{key}"
        is_default = value == fields[key].get_default(call_default_factory=True)
        if is_default and (value in (None, "", ()) or not _has_effect(work, path)):
            continue
        if isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
            shown[key] = [_used(work, each, f"{path}.") for each in value]
        else:
            shown[key] = _used(work, value, f"{path}.") if isinstance(value, BaseModel) else dumped
    return shown


def _has_effect(work: Any, path: str) -> bool:
    if path in ("sharding", "pipeline"):
        return not work.mesh.replicates_only if path == "sharding" else work.mesh.sizes["pp"] != 1
    if path == "model.new_head" and work.model.init_from is None:
        return False
    section, _, key = path.rpartition(".")
    found = [
        (_at(work, decisive), _owners(key, kinds)) for at, decisive, kinds in (*OWN_KEYS, *IDLE_KEYS) if at == section
    ]
    return all(name in owners for name, owners in found if owners)


def _owners(key: str, kinds: Mapping[str, str]) -> list[str]:
    return [name for name, keys in kinds.items() if key in keys.split()]


def _at(work: Any, path: str) -> Any:
    """The value of a dotted key; None where a section of it is not there."""
    return functools.reduce(lambda section, key: getattr(section, key, None), filter(None, path.split(".")), work)


def require_compatible(recipe: RecipeKeys) -> None:
    """Refuse keys that cannot be combined.

    Raises:
        ValidationError: names the section that they are in, if it is one.
    """
    if found := next(_faults(recipe), None):
        path, error = found
        location = tuple(filter(None, path.split(".")))
        fault: InitErrorDetails = {
            "type": "value_error",
            "loc": location,
            "input": path,
            "ctx": {"error": error},
        }
        raise ValidationError.from_exception_data("Recipe", [fault])


def _faults(recipe: RecipeKeys) -> Iterator[tuple[str, InvalidValueError]]:
    """Sections, empty for several of them, and what is wrong there."""
    for section, decisive, kinds in OWN_KEYS:
        values, name = _at(recipe, section), _at(recipe, decisive)
        for key, field in type(values).model_fields.items() if values else ():
            owners = _owners(key, kinds)
            if owners and name not in owners and getattr(values, key) != field.default:
                has = f", which has {_joined(kinds[name].split())}" if name in kinds else ""
                yield (
                    section,
                    InvalidValueError(
                        "HT-recipe-key-of-another",
                        "{key} belongs to {owners}, not to {name}{has}",
                        key=key,
                        owners=_joined(owners),
                        name=name,
                        has=has,
                    ),
                )
    yield from (("optimizer", error) for error in _of_optimizer(recipe.optimizer))
    yield from (("schedule", error) for group in (_of_schedule, _of_warmup) for error in group(recipe.schedule))
    for group in (
        _of_tuning,
        _of_text,
        _of_length,
        _of_sync,
        _of_end_rate,
        _of_axes,
        _of_mesh,
        _of_compile,
        _of_batch,
    ):
        yield from (("", error) for error in group(recipe))


def _joined(names: Sequence[str]) -> str:
    """``sgd, lars and lamb``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _of_optimizer(optimizer: Optimizer) -> Iterator[InvalidValueError]:
    if optimizer.nesterov and not optimizer.momentum:
        yield InvalidValueError("HT-key-needs-another", "nesterov needs momentum above 0")
    if optimizer.momentum_correction and not optimizer.rate_in_momentum:
        yield InvalidValueError(
            "HT-key-needs-another",
            "momentum_correction is for momentum that has the rate in it (rate_in_momentum)",
        )
    if optimizer.trust_decay is not None and optimizer.trust_denominator != "sum_of_norms":
        yield InvalidValueError("HT-key-needs-another", "trust_decay is for trust_denominator: sum_of_norms")
    if optimizer.name == "adam" and optimizer.weight_decay:
        yield InvalidValueError(
            "HT-recipe-key-of-another",
            "weight_decay does not belong to adam: frameworks disagree on its meaning; adamw has one",
        )
    if optimizer.name == "rmsprop_to_sgd" and optimizer.transition is None:
        yield InvalidValueError("HT-key-needs-another", "rmsprop_to_sgd needs transition, and only it has one")


def _of_schedule(schedule: Schedule) -> Iterator[InvalidValueError]:
    name, milestones = schedule.name, schedule.milestones
    if name in ("step", "piecewise") and not milestones:
        yield InvalidValueError("HT-key-needs-another", "schedule {name!r} needs milestones", name=name)
    if name == "piecewise" and len(schedule.factors) != len(milestones) + 1:
        yield InvalidValueError("HT-key-needs-another", "schedule 'piecewise' needs one factor more than milestones")
    if list(milestones) != sorted(set(milestones)):
        yield InvalidValueError("HT-key-out-of-range", "milestones must rise")
    if milestones and milestones[0] <= schedule.warmup_epochs:
        yield InvalidValueError("HT-key-out-of-range", "milestones must come after the warm-up")


def _of_warmup(schedule: Schedule) -> Iterator[InvalidValueError]:
    name, steps = schedule.name, schedule.warmup_steps
    if name == "triangular" and (schedule.peak_epoch is None or schedule.warmup_from is None):
        yield InvalidValueError(
            "HT-key-needs-another", "schedule 'triangular' needs peak_epoch, and warmup_from, where it begins"
        )
    if name == "triangular" and (schedule.warmup_epochs or schedule.warmup == "constant"):
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "schedule 'triangular' climbs until peak_epoch and has no other warm-up",
        )
    if not schedule.climbs and (schedule.warmup_from is not None or schedule.warmup == "constant"):
        yield InvalidValueError(
            "HT-key-needs-another",
            "warmup and warmup_from need warmup_epochs above 0, during which they hold",
        )
    if steps and schedule.warmup_epochs:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "warmup_steps ({steps:g}) and warmup_epochs ({epochs:g}) exclude each other; --set "
            "schedule.warmup_steps=null, or --set schedule.warmup_epochs=0",
            steps=steps,
            epochs=schedule.warmup_epochs,
        )
    if steps and not schedule.decay_steps:
        yield InvalidValueError(
            "HT-key-needs-another",
            "warmup_steps needs decay_steps: a run counted in steps is counted in steps throughout",
        )
    if steps and schedule.held != "iteration":
        yield InvalidValueError("HT-key-needs-another", "warmup_steps is for rates that are held for an iteration")
    if name != "triangular" and schedule.climbs and schedule.base_batch is None and schedule.warmup_from is None:
        key = "warmup_steps" if steps else "warmup_epochs"
        yield InvalidValueError(
            "HT-key-needs-another",
            "{key} needs base_batch, whose scaled rate it climbs to from learning_rate, or warmup_from",
            key=key,
        )


def _of_tuning(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    """What begins with given weights, or trains a part of its network otherwise."""
    model = recipe.model
    if model.init_from is None and model.new_head != "auto":
        yield InvalidValueError(
            "HT-key-needs-another", "model.new_head is for a network that begins with model.init_from"
        )
    given = {
        "model.init_from": model.init_from,
        "model.frozen": model.frozen,
        "optimizer.rates": recipe.optimizer.rates,
    }
    if not recipe.mesh.replicates_only and (keys := [key for key, value in given.items() if value]):
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "{keys}: for networks that each rank has whole, and not for mesh {mesh}",
            keys=_joined(keys),
            mesh=recipe.mesh,
        )


def _of_text(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    """A GPT predicts the next token of a text, and nothing else."""
    model, data = recipe.model.name, recipe.data.name
    if (model == "gpt") != (data == "text"):
        choices = "--set data.name=text" if model == "gpt" else "--set model.name=gpt, or --set data.name=imagenet"
        yield InvalidValueError(
            "HT-model-of-other-data",
            "model.name: {model} does not go with data.name: {data}; {choices}",
            model=model,
            data=data,
            choices=choices,
        )
    if model == "gpt" and recipe.loss != "cross_entropy":
        yield InvalidValueError(
            "HT-loss-for-images", "loss: {loss} is for images; --set loss=cross_entropy", loss=recipe.loss
        )


def _of_length(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    schedule, epochs = recipe.schedule, recipe.epochs
    if schedule.warmup_epochs > epochs:
        yield InvalidValueError(
            "HT-key-out-of-range",
            "schedule.warmup_epochs ({warmup:g}) is longer than the run (epochs: {epochs}); --set "
            "schedule.warmup_epochs=0 does without",
            warmup=schedule.warmup_epochs,
            epochs=epochs,
        )
    if schedule.milestones and schedule.milestones[-1] >= epochs:
        yield InvalidValueError(
            "HT-key-out-of-range",
            "schedule.milestones ({last:g}) are not all within the run (epochs: {epochs}); for example --set "
            "'schedule.milestones=[{example:g}]'",
            last=schedule.milestones[-1],
            epochs=epochs,
            example=epochs / 2,
        )
    if schedule.peak_epoch and schedule.peak_epoch >= epochs:
        yield InvalidValueError(
            "HT-key-out-of-range",
            "schedule.peak_epoch ({peak:g}) is not within the run (epochs: {epochs}); for example --set "
            "schedule.peak_epoch={example:g}",
            peak=schedule.peak_epoch,
            epochs=epochs,
            example=epochs / 2,
        )


def _of_end_rate(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    if fault := climbs(recipe):
        yield InvalidValueError(fault.code, f"{fault.sentence}; --set schedule.end_rate=0", **fault.values)


def climbs(recipe: RecipeKeys) -> InvalidValueError | None:
    """The fault of a rate that ends above its peak, if the peak is known."""
    base, size = recipe.schedule.base_batch, recipe.batch.fixed_size
    if base and not size:
        return None
    peak = recipe.optimizer.learning_rate * (size / base if base and size else 1)
    if recipe.schedule.end_rate <= peak:
        return None
    of = f"optimizer.learning_rate, scaled to batch.size {size}" if base else "optimizer.learning_rate"
    return InvalidValueError(
        "HT-key-out-of-range",
        "schedule.end_rate ({end_rate:g}) is above {of} ({peak:g}), which should fall to it",
        end_rate=recipe.schedule.end_rate,
        of=of,
        peak=peak,
    )


def _of_sync(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    sync, compression = recipe.sync, recipe.communication.compression
    if sync is None:
        return
    if recipe.fault_tolerance.fault_tolerant:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and what a dead rank has learnt in them is lost; "
            "fault_tolerance: stop resumes the run",
        )
    if compression != "none" and not sync.after_epochs:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, without gradients for communication.compression to narrow",
        )
    if not recipe.mesh.replicates_only:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and no rank of mesh {mesh} has the whole model; "
            "--mesh dp_replicate=-1",
            mesh=recipe.mesh,
        )
    if recipe.averaging:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and averaging follows parameters that are equal on "
            "all ranks after each of them",
        )
    if recipe.precision == "fp16":
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and precision: fp16 scales the loss by what "
            "overflowed on any rank; bf16 does not",
        )
    if recipe.numbers.non_finite == "skip":
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and numbers.non_finite: skip leaves a step out on all "
            "of them; stop and roll_back work",
        )
    if recipe.model.batch_norm.span == "world":
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync lets each rank take steps by itself, and model.batch_norm.span: world joins all ranks in each",
        )
    if sync.mode == "async" and recipe.checkpoints.every_steps:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "sync: async brings the ranks together at the end of an epoch only; leave checkpoints.every_steps out",
        )


def _of_axes(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    """Axes that the model cannot be divided along, and keys about an axis that is not there."""
    name, sizes = recipe.model.name, recipe.mesh.sizes
    for axis, why in _WITHOUT.items():
        if sizes[axis] != 1 and axis not in MODEL_AXES[name]:
            yield InvalidValueError(
                "HT-mesh-not-supported",
                "mesh.{axis}: {model} {reason}; --mesh {axis}=1,dp_shard=-1 divides its state instead, in PyTorch",
                axis=axis,
                model=name,
                reason=why,
            )
    if recipe.sharding.recompute and "pp" not in MODEL_AXES[name]:
        yield InvalidValueError(
            "HT-mesh-recompute-without-blocks",
            "sharding.recompute: {model} has no blocks to recompute; --set sharding.recompute=false",
            model=name,
        )
    if sizes["dp_shard"] == 1 and recipe.sharding.zero != Sharding().zero:
        yield InvalidValueError(
            "HT-key-needs-another",
            "sharding.zero: {zero} is for a mesh with dp_shard; for example --mesh dp_shard=-1",
            zero=recipe.sharding.zero,
        )
    for key, value in dict(recipe.pipeline).items():
        if sizes["pp"] == 1 and value != getattr(Pipeline(), key):
            yield InvalidValueError(
                "HT-key-needs-another",
                "pipeline.{key}: {value} is for a mesh with pp; for example --mesh pp=2",
                key=key,
                value=value,
            )


def _of_mesh(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    mesh, faults, compression = recipe.mesh, recipe.fault_tolerance, recipe.communication.compression
    changes = "fault_tolerance: shrink" if faults.fault_tolerant else "fault_tolerance.grow" if faults.grow else None
    if changes and not mesh.replicates_only:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "{changes} with mesh {mesh}: a lost rank takes its part of the model with it, so that the run "
            "has to resume from its checkpoint; --set fault_tolerance=stop does that",
            changes=changes,
            mesh=mesh,
        )
    if changes and mesh.dp_replicate not in (None, FILL):
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "{changes} changes the number of ranks, and mesh.dp_replicate fixes it; --mesh dp_replicate=-1",
            changes=changes,
        )
    if recipe.averaging and not mesh.replicates_only:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "averaging follows parameters that each rank has whole, and not those of mesh {mesh}; leave it out",
            mesh=mesh,
        )
    if compression != "none" and not mesh.replicates_only:
        yield InvalidValueError(
            "HT-keys-exclude-each-other",
            "communication.compression: {compression} is for gradients that each rank has whole, and not for "
            "mesh {mesh}; --set communication.compression=none",
            compression=compression,
            mesh=mesh,
        )


def _of_compile(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    if recipe.compile == "on" and (fault := uncompilable(recipe)):
        yield fault


def _of_batch(recipe: RecipeKeys) -> Iterator[InvalidValueError]:
    """Memory must not decide over how many images statistics are."""
    span = recipe.model.batch_norm.span
    if recipe.batch.micro_batch == "auto" and recipe.model.name in _RESIDUAL and not isinstance(span, int):
        yield InvalidValueError(
            "HT-batch-auto-not-possible",
            "batch.micro_batch: auto would choose over how many images {model} normalises, and with them the result; "
            "--set model.batch_norm.span=N fixes their number, or --set batch.micro_batch=N",
            model=recipe.model.name,
        )


def uncompilable(recipe: RecipeKeys) -> InvalidValueError | None:
    """Why a recipe's network cannot be compiled; ``compile: auto`` leaves it as it is then."""
    sizes, schedule = recipe.mesh.sizes, recipe.pipeline.schedule
    if sizes["tp"] != 1:
        return InvalidValueError(
            "HT-keys-exclude-each-other",
            "compile: on with mesh {mesh}: hooks that PyTorch cannot compile divide and join what layers compute over "
            "tp; --set compile=off",
            mesh=recipe.mesh,
        )
    if sizes["pp"] != 1 and schedule in _SPLIT_BACKWARD:
        return InvalidValueError(
            "HT-keys-exclude-each-other",
            "compile: on with pipeline.schedule: {schedule}: it computes the gradients of inputs and of weights apart, "
            "and a compiled block gives them together; --set pipeline.schedule=1f1b, or --set compile=off",
            schedule=schedule,
        )
    return None
