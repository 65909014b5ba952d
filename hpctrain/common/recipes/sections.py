"""The sections and keys of a recipe, each with what it accepts by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.augmentation import Augmentation, Averaging, Erasing, Mixing
from hpctrain.common.recipes.families import ModelFamily, ModelName, family_of, names
from hpctrain.common.recipes.gpt import GptSettings
from hpctrain.common.recipes.keys import CheckedSection, Count, Fraction, NotNegative, Of, Positive
from hpctrain.common.recipes.mesh import Mesh, Pipeline, Sharding
from hpctrain.common.recipes.optimizers import Optimizer
from hpctrain.common.recipes.reliability import Checkpointing, FaultTolerance, GuardSettings, Numbers
from hpctrain.common.recipes.schedule import Schedule
from hpctrain.common.recipes.sync import Sync
from hpctrain.common.recipes.tracking import Trackers

_RESIDUAL = Of("name", names(normalising=True))
_DIGITS, _IMAGENET, _TEXT = (Of("name", name, idle=True) for name in ("digits", "imagenet", "text"))

# Samples that an epoch with repeated augmentation is rounded down to a multiple of (DeiT's samplers.py, which
# torchvision and timm follow).
_ROUND = 256
# Decoding processes of a rank where none are asked for; more than the second were never measured.
_FEWEST, _MOST = 2, 14


class BatchNormSettings(Section):
    """How batch normalisation computes its statistics."""

    span: Count | Literal["world"] | None = Field(
        None,
        description="images that share their statistics: fewer than a rank computes at once (ghost batch norm), more "
        "(those of neighbouring ranks), or those of all ranks (world); by default what a rank computes at once",
    )
    momentum: Fraction = Field(0.9, description="share of the running statistics that is kept at each step")
    epsilon: Positive = Field(1e-5, description="added to the variance")
    statistics: Literal["running", "last_batch"] = Field(
        "running", description="what validation uses: running averages, or the last batch's (Akiba et al. 2017)"
    )


class _Network(CheckedSection):
    # A base class of its own, so that the name comes before the keys of a GPT.
    name: ModelName = Field(description="digits_cnn for the digits, a residual network for images, gpt for text")


class InitialWeights(Section):
    """The initial weights of a residual network's convolutions and last layer; other biases are 0."""

    fan: Literal["in", "out"] = Field(
        "out",
        description="a convolution's weights have the variance scale / fan: the values that go into one of its "
        "outputs, or the outputs that one of its inputs has a part in (He et al. 2015, arXiv 1502.01852)",
    )
    scale: Positive = Field(2.0, description="2 in He et al. 2015, 1 in TensorFlow's variance_scaling_initializer")
    truncated: bool = Field(False, description="drawn again beyond two deviations; the variance stays what it is")
    last_layer: Literal["normal", "uniform"] = Field(
        "normal",
        description="N(0, 0.01) and biases of 0 (Goyal et al. 2017), or what torch.nn.Linear does: weights and biases "
        "uniform within 1 / sqrt(its inputs)",
    )


class ModelSettings(GptSettings, _Network):
    """The network."""

    classes: Annotated[Count | None, _RESIDUAL] = Field(
        None,
        description="outputs of the last layer; by default as many as the data has classes, and never fewer",
    )
    init_from: str | None = Field(
        None,
        description="the weights that a training begins with: a run directory or a checkpoint of PyTorch, or a "
        ".safetensors file with these names, which are torchvision's and timm's too",
    )
    new_head: Annotated[bool | Literal["auto"], _RESIDUAL] = Field(
        "auto",
        description="with init_from: draw the last layer of a residual network anew, whatever the file has (true), "
        "where the file's is for other classes (auto), or never (false)",
    )
    frozen: tuple[str, ...] = Field(
        (),
        description="patterns of names of parameters, or of modules that hold them, that are not trained; batch "
        "normalisation in them keeps its statistics too (torch only)",
    )
    zero_gamma: Annotated[bool, _RESIDUAL] = Field(True, description="every block starts as the identity")
    weights: Annotated[InitialWeights, _RESIDUAL] = InitialWeights.defaults()
    batch_norm: Annotated[BatchNormSettings, _RESIDUAL] = BatchNormSettings.defaults()

    @property
    def family(self) -> ModelFamily:
        """The family of the network."""
        return family_of(self.name)


class Data(CheckedSection):
    """The samples."""

    name: Literal["digits", "imagenet", "text"] = Field(
        description="scikit-learn's digits, shards of images, whatever they show (imagenet), or tokens"
    )
    test_fraction: Annotated[float, Field(gt=0, lt=1), _DIGITS] = Field(
        0.2, description="share of the digits kept for testing"
    )
    split_seed: Annotated[Annotated[int, Field(ge=0, lt=2**32)] | None, _DIGITS] = Field(
        None,
        description="decides which digits are kept for testing; by default the recipe's seed, which decides the rest",
    )
    path: Annotated[str | None, Of("name", "imagenet text", idle=True)] = Field(
        None,
        description="the folder that hpctrain data shard (of imagenet) or data prepare-text (of text) wrote",
    )
    epoch_samples: Annotated[Count | None, _TEXT] = Field(
        None,
        description="samples between validations, across passes over the data; by default all",
    )
    limit: Annotated[Count | None, _IMAGENET] = Field(None, description="only the first so many images of each split")
    workers: Annotated[Annotated[int, Field(ge=0)] | None, _IMAGENET] = Field(
        None,
        description="decoding processes per rank; 0 decodes in the rank itself; by default one less than "
        "the cores of a rank that computes on a GPU, from 2 to 14, and 2 beside one that computes on cores",
    )
    decode: Annotated[Literal["scaled", "full", "gpu"], _IMAGENET] = Field(
        "scaled",
        description="JPEG files are decoded by processes at a half, a quarter or an eighth of their size "
        "where the crop has enough pixels then (scaled), or always at their size (full); or by the rank's GPU at their "
        "size, with nvJPEG through torchvision (gpu)",
    )
    repeats: Annotated[Count, _IMAGENET] = Field(
        1,
        description="repeated augmentation (Hoffer et al. 2019, arXiv 1901.09335): an epoch has the usual number of "
        "samples, rounded down to a multiple of 256, but draws only one in this many images, each of which occurs "
        "this often within a step, augmented anew each time",
    )

    def decoders(self, spare_cores: int = 0) -> int:
        """The decoding processes of each rank, by default one for each core that it does not compute on itself."""
        return self.workers if self.workers is not None else min(max(_FEWEST, spare_cores), _MOST)

    def per_epoch(self, images: int) -> int:
        """The samples of an epoch over this many training images; repetitions count as samples."""
        if self.epoch_samples:
            return self.epoch_samples
        return images // _ROUND * _ROUND or images if self.repeats > 1 else images


class Images(CheckedSection):
    """How photographs become the network's input."""

    size: Count = Field(224, description="pixels per side in training")
    size_ramp: tuple[tuple[NotNegative, Count], ...] = Field(
        (), description="instead of size: (epoch, pixels) points, joined linearly and rounded to multiples of 32"
    )
    crop_area: tuple[Positive, Positive] = Field((0.08, 1.0), description="share of the photograph's area")
    crop_ratio: tuple[Positive, Positive] = Field((3 / 4, 4 / 3), description="width over height")
    flip: bool = Field(True, description="mirror every second image in training, at random")
    augmentation: Augmentation | None = None
    erasing: Erasing | None = None
    test_resize: Count = Field(
        256, description="pixels of the shorter side in validation, before the centre is cropped"
    )
    test_size: Count = Field(224, description="pixels per side in validation")
    mean: tuple[float, float, float] = Field((0.485, 0.456, 0.406), description="of red, green and blue, in 0 to 1")
    deviation: tuple[Positive, Positive, Positive] = Field((0.229, 0.224, 0.225), description="the same")

    def faults(self) -> Iterator[str]:
        if self.test_size > self.test_resize:
            yield f"test_size ({self.test_size}) is more than test_resize ({self.test_resize}) leaves"
        if not self.crop_area[0] <= self.crop_area[1] <= 1:
            yield "crop_area is a smallest and a largest share, at most 1"
        if self.crop_ratio[0] > self.crop_ratio[1]:
            yield "crop_ratio is a smallest and a largest one"
        epochs = [epoch for epoch, _ in self.size_ramp]
        if epochs != sorted(set(epochs)):
            yield "the epochs of size_ramp must rise"


class Batch(CheckedSection):
    """How the samples of one step are counted. One of ``size`` and ``per_rank`` is given.

    Ranks are here the data-parallel ones, of which a mesh may make each of several ranks
    (:attr:`hpctrain.common.recipes.mesh.Mesh.data_ranks`).
    """

    size: Count | None = Field(None, description="samples of one step over all ranks (the papers' kn)")
    per_rank: Count | None = Field(None, description="samples of one step on each data-parallel rank (the papers' n)")
    emulated_ranks: Count | None = Field(
        None,
        description="with per_rank: the batch of this many ranks, however many ranks there are; they "
        "accumulate gradients",
    )
    micro_batch: Count | Literal["auto"] | None = Field(
        None,
        description="samples that a rank computes at once, to save memory; its share is cut accordingly. auto: as many "
        "as its memory has room for by prediction, in equal parts; chosen when a run begins, and kept by its plan",
    )
    drop_last: bool = Field(False, description="leave out the last, smaller batch of an epoch")

    def faults(self) -> Iterator[str]:
        if (self.size is None) == (self.per_rank is None):
            yield "exactly one of size (over all ranks) and per_rank is needed"
        if self.emulated_ranks and self.per_rank is None:
            yield "emulated_ranks multiplies per_rank; size says all by itself"

    def at(self, ranks: int) -> Batch:
        """This batch with ``size`` for a number of ranks; emulated ranks keep what each computes together."""
        if self.per_rank is None:
            return self
        size = self.per_rank * (self.emulated_ranks or ranks)
        piece = self.micro_batch or (self.per_rank if self.emulated_ranks else None)
        return self.model_copy(update={"size": size, "per_rank": None, "emulated_ranks": None, "micro_batch": piece})

    @property
    def fixed_size(self) -> int | None:
        """The samples of one step over all ranks; None if it depends on their number."""
        return self.at(1).size if self.size or self.emulated_ranks else None

    def iterations(self, samples: int) -> int:
        """The steps of an epoch over this many samples, for a batch that :meth:`at` made."""
        assert self.size is not None
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def parts(self, samples: int, ranks: int) -> int:
        """The number of parts into which each rank cuts its share of a step's samples; the same on all ranks.

        One for ``auto``, before a plan has a number for it.
        """
        if self.micro_batch is None or self.micro_batch == "auto":
            return 1
        return -(-samples // (ranks * self.micro_batch))

    def at_once(self, ranks: int) -> int:
        """The most samples that one of this many ranks computes together, for a batch that :meth:`at` made."""
        assert self.size is not None
        return -(-self.size // (ranks * self.parts(self.size, ranks)))


class Communication(Section):
    """How gradients are sent."""

    bucket_mb: Positive | None = Field(
        None,
        description="size of a gradient bucket in MB (10^6 bytes); 25, between hosts over mpi without RDMA 4 or more",
    )
    compression: Literal["none", "fp16", "bf16"] = Field("none", description="type of the gradients on the wire")


class Reported(Section):
    """A result that the source states."""

    metric: str = Field(description="its name in a run's summary, such as test_accuracy")
    value: float = Field(description="what the source states")
    deviation: NotNegative | None = Field(None, description="over the source's repetitions")
    batch: Count | None = Field(None, description="samples of a step that it holds for; by default any")
    remark: str = Field("", description="shown beside it")
    of_other_values: bool = Field(
        False, description="set where --set changed a value that decides the result: this is for the replaced values"
    )


class RecipeKeys(CheckedSection):
    """The keys of a recipe. Values that the file leaves out have the defaults given here."""

    name: str = Field(description="what runs and reports call the recipe")
    source: str = Field("", description="the paper or code that the values are from")
    cost: str = Field("", description="hardware and time, as the source states them")
    reported: tuple[Reported, ...] = Field((), description="results that the source states")
    model: ModelSettings
    data: Data
    images: Annotated[Images, Of("data.name", "imagenet", idle=True)] = Images.defaults()
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule.defaults()
    mixing: Annotated[Mixing | None, Of("model.name", f"digits_cnn {names(normalising=True)}")] = None
    loss: Literal["cross_entropy", "binary_cross_entropy"] = Field(
        "cross_entropy",
        description="in training; binary: the mean over the classes, each against all others (Wightman et al. 2021), "
        "torch only",
    )
    target_threshold: Annotated[Fraction | None, Of("loss", "binary_cross_entropy")] = Field(
        None,
        description="a class's share of a label counts as 1 above it, and as 0 otherwise",
    )
    label_smoothing: Fraction = Field(0.0, description="share of a label that is spread over all classes")
    averaging: Averaging | None = None
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32", description="of forward and backward pass; parameters stay float32; fp16 is torch only"
    )
    compile: Literal["auto", "on", "off", "graphs"] = Field(
        "auto",
        description="by PyTorch's compiler: on GPUs, always, never, or always and replayed as CUDA graphs, for few "
        "samples at once; changes the last digits of numbers (torch only)",
    )
    epochs: Annotated[int, Field(ge=1, le=100_000)] = Field(description="passes over the training samples")
    median_of: Count = Field(1, description="epochs at the end whose median is the result (Goyal et al. 2017: 5)")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of weights, order, crops and divisions")
    smoke: bool = Field(False, description="made small by --smoke: nothing that the source reports applies to it")
    notes: tuple[str, ...] = Field((), description="what --set changed besides the given values")
    communication: Communication = Communication.defaults()
    mesh: Mesh = Mesh.defaults()
    sharding: Sharding = Sharding.defaults()
    pipeline: Pipeline = Pipeline.defaults()
    sync: Sync | None = Field(None, description="ranks take steps by themselves; null averages gradients in every step")
    guard: GuardSettings = GuardSettings.defaults()
    fault_tolerance: FaultTolerance = FaultTolerance.defaults()
    checkpoints: Checkpointing = Checkpointing.defaults()
    numbers: Numbers = Numbers.defaults()
    tracking: Trackers | None = Field(
        None, description="where curves go: tensorboard (the default), mlflow, wandb; changes no number of the run"
    )

    @property
    def idle_keys(self) -> tuple[str, ...]:
        """Keys without effect beside the others."""
        divides = not self.mesh.replicates_only or self.sharding.recompute
        return (*["sharding"] * (not divides), *["pipeline"] * (self.mesh.sizes["pp"] == 1))

    @field_validator("compile", mode="before")
    @classmethod
    def _compile(cls, value: object) -> object:
        # In YAML, on and off are true and false.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
