"""What a user may set: a job file or `JobConfig(...)`, checked before anything starts.

A field's description says what it means and why its default is what it is; `elastic-trainer config schema` prints them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic_trainer.errors import ConfigError, did_you_mean

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
START_FROM = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})(?:@(\d+))?")
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Section):
    """Where the samples come from, and in what portions they are read."""

    train: str = Field(description="Dataset folder to train on, a path or URL, made by `elastic-trainer prepare`.")
    evaluation: str | None = Field(None, description="Dataset folder for the task's evaluate(); none: no evaluation.")
    engine: Literal["auto", "ray", "direct"] = Field(
        "auto",
        description="Who reads and preprocesses: Ray Data on CPUs of its own (ray), or each worker (direct). auto: Ray "
        "Data when the task has preprocess(). Always the workers when the cluster has no data.cpus beside them.",
    )
    cpus: Positive = Field(1, description="CPUs that Ray Data gets, beside those of the workers.")
    storage_options: dict[str, Any] | None = Field(
        None,
        repr=False,
        exclude=True,
        description="For the client of the data's store. Unset: those of the run's storage. Never stored or printed.",
    )
    drop_last: bool = Field(
        False,
        description="Leave out the samples of an epoch that do not fill a last step. Off: each sample is trained.",
    )
    window_bytes: Positive = Field(
        256 << 20,
        description="Bound of the data of one window (the samples of K steps) over all workers; a worker holds two "
        "windows of its share. 256 MiB lets whole row groups be read for all but the largest batches.",
    )


class ScalingConfig(_Section):
    """How many workers, and what each needs."""

    min_workers: Positive = Field(1, description="Below this the run waits. 1: a run goes on as long as one is left.")
    max_workers: Positive | None = Field(
        None, description="At most so many train. Unset: as many as the cluster can hold at first start."
    )
    spares: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Workers beside max_workers that hold their resources, have built the model and wait: one takes "
        "over at once when another is lost, without the seconds that a new process needs.",
    )
    stragglers: Literal["name", "relieve"] = Field(
        "name",
        description="A worker that takes 1.8 times as long as the others for a micro-batch, five steps in a row, is "
        "named; relieve: it also gets fewer logical ranks, in proportion, until it is as fast as the others again.",
    )
    schedule: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(
        [],
        description="At most so many workers from so many done steps on, such as [[0, 2], [1000, 6]]; from min_workers "
        "to max_workers. `elastic-trainer scale` comes before it.",
    )
    resources_per_worker: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {"CPU": 1.0}, description="What Ray reserves for each worker, such as {CPU: 2} or {CPU: 0.5}."
    )
    wait_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="How long a start waits until min_workers have found their resources. 0: not at all, because the "
        "cluster that a run starts for itself does not grow.",
    )


class TimeoutsConfig(_Section):
    """Bounds, not detectors: faults are told by sockets, processes and orders long before."""

    form_s: Seconds = Field(
        20.0,
        description="Bound of forming a process group. It takes milliseconds; 20 s leaves room for a machine whose "
        "cores are all taken and for slow name look-ups (5 s were seen).",
    )
    storage_s: Seconds = Field(
        30.0,
        description="Bound of one call to the storage with its repetitions, beside the time that its bytes take at "
        "4 MiB/s. A busy bucket asks for retries within seconds.",
    )
    save_s: Seconds = Field(
        600.0,
        description="Bound of one save, from the copy until it stands. Ten minutes move 100 GB at a modest rate.",
    )
    stall_s: Seconds | None = Field(
        None,
        description="How long a worker may stand still in a step before it is taken for hung and replaced; 15 times "
        "that, at least 30 s, while it uses the CPU. Unset: learned, 8 times its longest recent stay in the same "
        "phase, at least 2 s (30 s where it waits for data, evaluates or runs other code of the task). The first times "
        "have 300 s: they may compile. Other bounds follow from it: after twice that, at least 60 s, without a step or "
        "a word of a controller a worker ends, since somebody else may have its place; and what one has that uses the "
        "CPU, at least 300 s, is how much later than others it may come to a collective or leave its group.",
    )
    orphan_s: Seconds = Field(
        600.0,
        description="Without a controller for so long a node's workers end, whatever they do: nothing of it could be "
        "saved. Ten minutes outlast the restart of a cluster's head.",
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        _require(
            self.save_s >= self.storage_s,
            f"timeouts.save_s = {self.save_s:g} is shorter than timeouts.storage_s = {self.storage_s:g}: a save is "
            "made of calls to the storage, and would be given up while one of them still has time. Raise save_s or "
            "lower storage_s.",
        )
        return self


class CheckpointConfig(_Section):
    """When the state is saved, and what is kept. A run that stops or ends is saved besides."""

    every_steps: Positive | None = Field(None, description="Save after every so many steps.")
    every_minutes: Annotated[float, Field(gt=0)] | None = Field(
        5.0,
        description="Save when the last save is so long ago. 5 minutes is what a whole cluster that dies may cost; a "
        "save holds training up for one copy in memory only. null: by steps alone.",
    )
    keep_last: Positive = Field(
        3, description="How many of the newest saved steps stay. 3: should the newest be damaged, others are there."
    )
    keep_every: Positive | None = Field(None, description="Keep every saved step that divides by this, for good.")
    keep_best: str | None = Field(
        None,
        description="Keep the saved step with the best value of evaluate() by this name; '-loss' when less is better.",
    )


class JobConfig(_Section):
    """A training job."""

    name: str = Field(description="Names the run and its folder <storage>/<name>: letters, digits, '.', '_', '-'.")
    storage: str = Field(
        "./runs",
        description="What holds the run folders: a local path, which every node of the cluster must share, or "
        "s3://bucket/prefix, gs://… or az://…",
    )
    storage_options: dict[str, Any] = Field(
        {},
        repr=False,
        exclude=True,
        description="For fsspec's client of the storage: endpoint_url, key, secret and the like. Never stored with the "
        "run and never printed; unset, the client looks into the environment.",
    )
    start_from: str | None = Field(
        None,
        description="NAME or NAME@STEP: a new run begins with the model and optimizer that this run of the same "
        "storage has saved, at step 0.",
    )
    task: str | None = Field(None, description="module:Class of a TrainTask, or module:function of the loop API.")
    task_args: dict[str, Any] = Field({}, description="Arguments of the class, as JSON.")
    data: DataConfig = Field(description="Dataset folders and how they are read.")
    scaling: ScalingConfig = Field(default_factory=ScalingConfig, description="Workers and their resources.")
    steps: Positive | None = Field(None, description="Optimizer steps to train; give this or epochs.")
    epochs: Positive | None = Field(None, description="Passes over the data to train; give this or steps.")
    global_batch: Positive = Field(description="B, samples of one optimizer step over all workers; fixed for the run.")
    micro_batch: Positive | None = Field(
        None,
        description="Samples of one forward and backward. Unset: the largest that leaves 4 logical ranks a worker, so "
        "that work divides well among fewer of them.",
    )
    logical_ranks: Positive | None = Field(
        None,
        description="L, fixed slices of the global batch; B == L * micro_batch * accumulate. Unset: the smallest "
        "divisor of B / micro_batch that is at least 4 x max workers, else the largest.",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Of forward and backward: bf16 runs them under autocast; weights, gradients and the optimizer stay "
        "as the task made them.",
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Bound of the gradient's norm over all parameters; unset: no clipping."
    )
    rollback_after: Positive | None = Field(
        3,
        description="A step whose loss or gradient is not finite updates nothing. After so many in a row the run goes "
        "back to the newest saved step, once, and leaves them out on the way. null: never.",
    )
    evaluate_every: Positive | None = Field(
        None, description="Evaluate after every so many steps, besides at the end. Unset: at the end only."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When the state is saved and what is kept."
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(0, description="Of data order, initial weights and dropout.")
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig, description="Bounds, each with its reason.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        _require(
            NAME.fullmatch(self.name) is not None,
            f"name = {self.name!r} may hold letters, digits, '.', '_' and '-', up to 100, beginning with a letter or "
            "digit. Choose such a name.",
        )
        _require(
            self.start_from is None or START_FROM.fullmatch(self.start_from) is not None,
            f"start_from = {self.start_from!r} is not of the form NAME or NAME@STEP, such as first@1200.",
        )
        _require(
            (self.steps is None) != (self.epochs is None),
            f"steps = {self.steps} and epochs = {self.epochs}: give exactly one of them.",
        )
        low, high = self.scaling.min_workers, self.scaling.max_workers
        _require(
            high is None or high >= low,
            f"scaling.max_workers = {high} is below scaling.min_workers = {low}. Raise max_workers or lower "
            "min_workers.",
        )
        gpus = self.scaling.resources_per_worker.get("GPU", 1)
        _require(
            gpus == 1,
            f"scaling.resources_per_worker has GPU: {gpus:g}, and a worker holds one GPU whole: NCCL takes one process "
            "for each. Use GPU: 1, or leave it out.",
        )
        for step, workers in self.scaling.schedule:
            _require(
                low <= workers <= (high or workers) and step >= 0,
                f"scaling.schedule has [{step}, {workers}]: a number of workers below scaling.min_workers = {low} or "
                f"above scaling.max_workers{'' if high is None else f' = {high}'}, or a step before 0.",
            )
        _check_places(self)
        _check_evaluation(self)
        _check_batch(self)
        return self

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: list[str] | None = None) -> JobConfig:
        """The job of a file; relative paths in it are relative to the working directory.

        Args:
            path: Of the YAML file.
            overrides: Of the form `a.b=value`; the value is YAML.

        Raises:
            ConfigError: No such file, not YAML, or a field is wrong; says which, its value and what to do.
        """
        values = _overridden(_read(Path(path)), overrides or [])
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_local(url: str | None) -> bool:
    return url is None or "://" not in url or url.startswith("file://")


def _check_places(job: JobConfig) -> None:
    data_is_local = _is_local(job.data.train) and _is_local(job.data.evaluation)
    for field, options, places, is_local in (
        ("data.storage_options", job.data.storage_options, f"data.train = {job.data.train!r}", data_is_local),
        (
            "storage_options",
            job.storage_options,
            f"storage = {job.storage!r} and data.train = {job.data.train!r}",
            data_is_local and _is_local(job.storage),
        ),
    ):
        _require(
            not (options and is_local),
            f"{field} has {', '.join(map(str, options or {}))}, but {places} is on the local disk, which takes no "
            "options. Name a URL such as s3://bucket/prefix, or leave them out.",
        )


def _check_evaluation(job: JobConfig) -> None:
    for field, value in (("evaluate_every", job.evaluate_every), ("checkpoint.keep_best", job.checkpoint.keep_best)):
        _require(
            value is None or job.data.evaluation is not None,
            f"{field} = {value!r} needs an evaluation, and data.evaluation is not set. Name a dataset folder there, or "
            f"leave {field} out.",
        )


def _check_batch(job: JobConfig) -> None:
    batch, micro, ranks, most = job.global_batch, job.micro_batch, job.logical_ranks, job.scaling.max_workers
    if micro is not None:
        _require(
            batch % micro == 0,
            f"micro_batch = {micro} does not divide global_batch = {batch}. Use one of {_divisors_near(batch, micro)}.",
        )
    if ranks is not None:
        slices = batch // micro if micro is not None else batch
        _require(
            slices % ranks == 0,
            f"logical_ranks = {ranks} does not divide {slices}, which is global_batch = {batch}"
            + (f" / micro_batch = {micro}" if micro is not None else "")
            + f" (B == L * micro_batch * accumulate). Use one of {_divisors_near(slices, ranks)}.",
        )
        least = max(most or 1, job.scaling.min_workers)
        _require(
            least <= ranks,
            f"scaling.{'max' if most else 'min'}_workers = {least} is above logical_ranks = {ranks}: the others would "
            "have no work. Lower it or raise logical_ranks.",
        )
    else:
        slices = batch // (micro or 1)
        least = max(most or 1, job.scaling.min_workers)
        _require(
            least <= slices,
            f"scaling.{'max' if most else 'min'}_workers = {least} is above the {slices} slices that global_batch = "
            f"{batch} has with micro_batch = {micro or 1}. Lower it, or raise global_batch.",
        )


def _divisors_near(number: int, wanted: int) -> str:
    divisors = sorted((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))
    return ", ".join(map(str, sorted(divisors[:4])))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, not fields. Begin with `name: my-run`.")
    return found


def _overridden(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ConfigError(f"--set {override}: not of the form field=value, such as scaling.max_workers=4.")
        *parents, last = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: {parent} is not a section, it holds {place!r}.")
        try:
            place[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from None
    return values


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A message of all wrong fields: name, value, what was expected."""
    lines = []
    for each in error.errors():
        where = ".".join(str(part) for part in each["loc"])
        match each["type"]:
            case "extra_forbidden":
                known = _fields_at(model, each["loc"][:-1])
                hint = did_you_mean(str(each["loc"][-1]), known) or f" Known are {', '.join(known)}."
                lines.append(f"{where} is not a known field.{hint}")
            case "missing":
                lines.append(f"{where} is missing. Set it: {_describe(model, each['loc'])}")
            case "value_error":
                lines.append(str(each["ctx"]["error"]))
            case _:
                expected = each["msg"].removeprefix("Input should be ")
                lines.append(
                    f"{where} = {each['input']!r} should be {expected}. {_describe(model, each['loc'])}".rstrip()
                )
    return lines[0] if len(lines) == 1 else "\n  ".join(["several fields are wrong:", *lines])


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)


def _describe(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            return ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return (field.description or "") if field is not None else ""
