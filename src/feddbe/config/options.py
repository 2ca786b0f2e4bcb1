"""The options of a run: one table for the command line, TOML files and Python.

Each option defines its section of the help, its role in a run's identity, its limits and its meaning.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from feddbe.config.parameters import Parameters, parameter, parse_number_or_text
from feddbe.errors import InvalidInputError, one_line, unknown_name
from feddbe.paths import read_text_file

SECTIONS = ("Data", "Model", "Training", "Evaluation", "Run")
Identity = Literal["yes", "content", "seed", "no"]
"""Role of an option in a run's identity.

- `yes`: another value makes another run.
- `content`: as `yes`, but hashed by the content that the value names.
- `seed`: another value is a repetition of the same experiment.
- `no`: the run can be resumed with another value.
"""

Optimizer = Literal["sgd", "adam"]
Variant = Literal["default", "paper", "official", "early-2023"]
BatchOrder = Literal["shuffled", "fixed"]
ShortBatch = Literal["keep", "refuse"]
BatchNormBuffers = Literal["local", "average"]
LastTestBatch = Literal["keep", "drop"]
Adaptation = Literal["full", "prbm", "newton"]
TrainerChoice = Literal["auto", "autograd", "compiled"]


def option(
    section: str,
    identity: Identity,
    default: Any,
    meaning: str,
    *,
    metavar: str = "",
    has_commas: bool = False,
    **limits: Any,
) -> Any:
    """Return a field of `Config`.

    Args:
        section: Section of the help.
        identity: Role in a run's identity.
        default: Default value; None if it depends on data and model.
        meaning: Help text.
        metavar: Placeholder of the value in the help, if its type does not say enough.
        has_commas: True if a comma is part of a value and does not separate the values of a sweep.
        **limits: Limits of the value, see `parameter`.
    """
    field = parameter(default, meaning, **limits)
    metadata = {"section": section, "identity": identity, "metavar": metavar, "has_commas": has_commas}
    return dataclasses.field(default=default, metadata={**field.metadata, **metadata})


@dataclass(frozen=True)
class Config(Parameters):
    """The options of one run; None selects the default for the data and the model."""

    # fmt: off
    method: str = option("Run", "content", "", "method and add-ons, as in fedavg+dbe(kappa=5,mu=0.1)")
    data: str = option("Data", "content", "digits",
        "data set or your own data: FILE.npz, .csv, .parquet, FOLDER, hf:NAME",
        metavar="NAME|FILE", has_commas=True)
    data_dir: str | None = option("Data", "no", None,
        "folder that is searched first for data files", metavar="DIR")
    partition: str | None = option("Data", "content", None,
        "iid, dirichlet:BETA, pathological:C or natural")
    partition_seed: int = option("Data", "content", 1,
        "seed of the partition; 1 is the published split", low=0)
    clients: int | None = option("Data", "yes", None, "number of clients N", low=1)
    min_samples: int = option("Data", "content", 0,
        "leave out clients of the data with fewer samples", low=0)
    split: str | None = option("Data", "content", None,
        "FILE.npz with a saved partition", metavar="FILE", has_commas=True)
    shift: str | None = option("Data", "yes", None,
        "transformation of each client's images: rotate:30, blur, noise, contrast, invert, or several",
        metavar="KIND")
    model: str | None = option("Model", "content", None,
        "model name or FILE.py:FUNCTION; default: the model that fits the data")
    cut: str | None = option("Model", "yes", None,
        "layer after which the model is split; default: before the last linear layer")
    rounds: int | None = option("Training", "no", None, "number of aggregations", low=0)
    patience: int | None = option("Training", "no", None,
        "rounds without a better accuracy after which training stops", low=1)
    local_epochs: int = option("Training", "yes", 1, "local epochs E", low=1)
    batch_size: int = option("Training", "yes", 10, "batch size B", low=1)
    lr: float | None = option("Training", "yes", None, "learning rate", above=0)
    lr_decay: str | None = option("Training", "yes", None,
        "learning rate schedule: step:EVERY:FACTOR, cosine or cosine:ROUNDS")
    optimizer: str = option("Training", "yes", "sgd",
        "local optimizer; its state is reset every round", choices=get_args(Optimizer))
    momentum: float = option("Training", "yes", 0.0, "momentum of SGD", low=0, high=0.999)
    weight_decay: float = option("Training", "yes", 0.0, "weight decay", low=0)
    clip_norm: float | None = option("Training", "yes", None, "maximum norm of a gradient", above=0)
    participation: float = option("Training", "yes", 1.0,
        "share rho of clients that take part in a round", above=0, high=1)
    seed: int = option("Training", "seed", 0, "seed of everything except the partition", low=0)
    variant: str = option("Training", "yes", "default",
        "source of values that are not given: default is tuned, the others are published values of the "
        "paper's text, the authors' code, or their runs of early 2023", choices=get_args(Variant))
    batch_order: str | None = option("Training", "yes", None,
        "order of training samples: shuffled every epoch, or fixed as in the partition",
        choices=get_args(BatchOrder))
    short_batch: str | None = option("Training", "yes", None,
        "treatment of a client with less than one batch", choices=get_args(ShortBatch))
    bn_buffers: str = option("Training", "yes", "local",
        "BatchNorm statistics: kept by the client or averaged", choices=get_args(BatchNormBuffers))
    force: bool = option("Training", "no", False, "allow an add-on that the method discourages")
    metrics: str = option("Evaluation", "no", "accuracy,auc,loss",
        "metrics that clients compute; accuracy is always included", metavar="NAMES", has_commas=True)
    eval: str = option("Evaluation", "yes", "all",
        "clients evaluated each round: all, cohort or sample:M", metavar="CLIENTS")
    last_test_batch: str | None = option("Evaluation", "yes", None,
        "incomplete last batch of each client's test data", choices=get_args(LastTestBatch))
    eval_after: bool = option("Evaluation", "yes", True, "evaluate after local training too")
    validation: float = option("Evaluation", "yes", 0.0,
        "share of the training data held out to choose the best round; tune and runs of several values: 0.2",
        low=0, high=0.9)
    new_clients: int = option("Evaluation", "yes", 0,
        "hold out the last N clients; they join and adapt after training", low=0)
    adapt_epochs: int = option("Evaluation", "yes", 10,
        "epochs of adaptation after training (+ft, fedbabu, new clients)", low=1)
    adaptation: str = option("Evaluation", "yes", "full",
        "adaptation of new clients: the method's training, or with +prbm p_i only, trained or in closed form",
        choices=get_args(Adaptation))
    engine: str = option("Run", "no", "auto", "auto, serial, pool(workers=N) or ray(address=HOST:PORT)")
    device: str = option("Run", "no", "cpu",
        "training device: cpu, cuda, cuda:N, mps or auto; affects the last bits of results")
    trainer: str = option("Run", "no", "auto",
        "training backend: auto, compiled or autograd; affects the last bits of results",
        choices=get_args(TrainerChoice))
    min_replies: int | None = option("Run", "no", None,
        "smallest number of replies with which a round is complete; none: all", low=1)
    worker_timeout: float | None = option("Run", "no", None,
        "seconds after which an unresponsive worker is replaced; none: never", above=0)
    keep_best: bool = option("Run", "no", True,
        "keep the clients' states of the best round (for export and analyze)")
    out: str | None = option("Run", "no", None, "output folder; default: a new one in runs/", metavar="DIR")
    resume: bool = option("Run", "no", False,
        "resume the run in --out, or the newest run with this configuration")
    json: bool = option("Run", "no", False, "print one JSON document")
    quiet: bool = option("Run", "no", False, "hide progress")
    # fmt: on


class _CommonOptions(TypedDict, total=False):
    """Options of `feddbe.run` and `feddbe.compare` that do not identify a run."""

    data_dir: str | None
    rounds: int | None
    patience: int | None
    force: bool
    metrics: str
    engine: str
    device: str
    trainer: TrainerChoice
    min_replies: int | None
    worker_timeout: float | None
    keep_best: bool
    out: str | None
    resume: bool
    json: bool
    quiet: bool


class RunOptions(_CommonOptions, total=False):
    """The options of `Config` for type checkers and editors, except method, data and model."""

    partition: str | None
    partition_seed: int
    min_samples: int
    clients: int | None
    split: str | None
    shift: str | None
    cut: str | None
    local_epochs: int
    batch_size: int
    lr: float | None
    lr_decay: str | None
    optimizer: Optimizer
    momentum: float
    weight_decay: float
    clip_norm: float | None
    participation: float
    seed: int
    variant: Variant
    batch_order: BatchOrder | None
    short_batch: ShortBatch | None
    bn_buffers: BatchNormBuffers
    eval: str
    last_test_batch: LastTestBatch | None
    eval_after: bool
    validation: float
    new_clients: int
    adapt_epochs: int
    adaptation: Adaptation


class CompareOptions(_CommonOptions, total=False):
    """As `RunOptions`, where an option that identifies a run may have several values."""

    seeds: int | str | Sequence[int]
    partition_seeds: int | str | Sequence[int]
    name: str
    partition: str | Sequence[str] | None
    partition_seed: int
    min_samples: int | Sequence[int]
    clients: int | Sequence[int] | None
    split: str | Sequence[str] | None
    shift: str | Sequence[str] | None
    cut: str | Sequence[str] | None
    local_epochs: int | Sequence[int]
    batch_size: int | Sequence[int]
    lr: float | Sequence[float] | None
    lr_decay: str | Sequence[str] | None
    optimizer: Optimizer | Sequence[Optimizer]
    momentum: float | Sequence[float]
    weight_decay: float | Sequence[float]
    clip_norm: float | Sequence[float] | None
    participation: float | Sequence[float]
    seed: int
    variant: Variant | Sequence[Variant]
    batch_order: BatchOrder | Sequence[BatchOrder] | None
    short_batch: ShortBatch | Sequence[ShortBatch] | None
    bn_buffers: BatchNormBuffers | Sequence[BatchNormBuffers]
    eval: str | Sequence[str]
    last_test_batch: LastTestBatch | Sequence[LastTestBatch] | None
    eval_after: bool | Sequence[bool]
    validation: float | Sequence[float]
    new_clients: int | Sequence[int]
    adapt_epochs: int | Sequence[int]
    adaptation: Adaptation | Sequence[Adaptation]


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
STUDY_OPTIONS = ("seeds", "partition_seeds", "name")
"""Options of several runs together, in addition to those of `Config`."""


NOT_TUNED = frozenset({"split", "resume", "new_clients", "adaptation", "keep_best"})
"""Options of a run that a search (`feddbe tune`) does not have."""


def identity_of_key(key: str) -> Identity:
    """Return the role of a key of a stored configuration; keys that are not options identify the run."""
    if key not in _FIELDS:
        return "yes"
    identity: Identity = _FIELDS[key].metadata["identity"]
    return identity


REPETITION_OPTIONS = ("seed", "partition_seed")
"""Options whose values are repetitions of one experiment."""


def identifying_settings(config: Mapping[str, Any], *, seed: bool = True) -> dict[str, Any]:
    """Return the settings that identify a run, with hyperparameters by part and name, as in `mr kappa`.

    Args:
        config: A stored configuration.
        seed: Include the seeds of run and partition; without them the settings identify the experiment.
    """
    excluded = ("method_options",) if seed else ("method_options", *REPETITION_OPTIONS)
    settings = {
        key: value for key, value in config.items() if key not in excluded and identity_of_key(key) != "no"
    }
    for part, options in config.get("method_options", {}).items():
        settings |= {f"{part} {key}": value for key, value in options.items()}
    return settings


class RunRequest(NamedTuple):
    """Methods to run, and their checked options."""

    names: list[str]
    config: Config
    origins: dict[str, str]
    """Origin of each option that was set: the name of a TOML file, or `given`."""


class RawOptions(NamedTuple):
    """Methods and options as the user wrote them, before they are checked."""

    names: list[str]
    values: dict[str, Any]
    origins: dict[str, str]
    seeds: Any = None
    """Several seeds: their number, or a list."""
    partition_seeds: Any = None
    """Several seeds of the partition: their number, or a list."""
    name: str | None = None
    """Name of the study."""

    def request(self) -> RunRequest:
        """Return the request, with every value checked."""
        for key in STUDY_OPTIONS:
            value = getattr(self, key)
            if value is not None:
                raise InvalidInputError(
                    f"{key} = {value}; this is one run: give one seed and a folder (out), or compare"
                )
        if not self.names:
            raise InvalidInputError("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
        return RunRequest(self.names, Config(**self.values), self.origins)


def parse_options(methods: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> RunRequest:
    """Return methods and options, each checked; see `collect_options`."""
    return collect_options(methods, options).request()


def collect_options(methods: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> RawOptions:
    """Merge TOML files and options; options override files.

    Args:
        methods: Names of methods, or TOML files whose keys are options; their `method` may be a list.
        options: Options by name; those that are None were not given.
    """
    names: list[str] = []
    layers: list[tuple[dict[str, Any], str]] = []
    for name in methods:
        if name.endswith(".toml"):
            values = _read_toml(Path(name))
            method = values.pop("method", [])
            names += map(str, method if isinstance(method, list) else [method])
            layers.append((values, name))
        else:
            names.append(name)
    explicit = {key: value for key, value in (options or {}).items() if value is not None}
    layers.append((_normalize_keys(explicit), "given"))
    merged = {key: value for values, _ in layers for key, value in values.items()}
    origins = {key: origin for values, origin in layers for key in values}
    if "method" in merged:  # from Python
        names = [str(merged.pop("method"))]
    study_options = {key: merged.pop(key, None) for key in STUDY_OPTIONS}
    return RawOptions(names, merged, origins, **study_options)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_text_file(path))
    except OSError as error:
        raise InvalidInputError(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOML errors, invalid UTF-8, endless numbers or nesting
        raise InvalidInputError(f"'{path}' is not valid TOML: {one_line(error)}") from error
    return _normalize_keys(values, f"'{path}'")


def _normalize_keys(values: Mapping[str, Any], file: str = "") -> dict[str, Any]:
    """Return the values by option name (`partition-seed` is `partition_seed`); unknown keys are errors."""
    normalized = {key.replace("-", "_"): value for key, value in values.items()}
    for key in normalized:
        if key not in (*_FIELDS, *STUDY_OPTIONS):
            allowed = [*_FIELDS, *STUDY_OPTIONS]
            raise unknown_name(f"key in {file}:" if file else "option", key, allowed)
    return normalized


@dataclass(frozen=True)
class SweepSpec:
    """Several runs: every variant of every method, with every combination of values and every seed."""

    names: list[str]
    """Methods as the user wrote them."""
    methods: list[list[str]]
    """The variants of each method: fedavg+dbe(kappa=1,10) has two."""
    options: dict[str, Any]
    """Options by name; a list has several values."""
    seeds: list[int]
    """Seeds; empty for the default seed."""
    partition_seeds: list[int]
    """Seeds of the partition, on each of which every seed is run; empty for the option or its default."""
    study_name: str | None = None

    @property
    def varied_options(self) -> list[str]:
        """Names of options with several values."""
        return [k for k, v in self.options.items() if isinstance(v, list) and identity_of_key(k) != "no"]

    @property
    def is_grid(self) -> bool:
        """True if a method has several settings to choose from."""
        return bool(self.varied_options) or any(len(variants) > 1 for variants in self.methods)


def parse_sweep(raw: RawOptions) -> SweepSpec | None:
    """Return the sweep, or None if each method has a single run."""
    seeds = _parse_seeds(raw, "seed", 0)
    partition_seeds = _parse_seeds(raw, "partition_seed", 1)
    if raw.partition_seeds is not None and raw.values.get("split") is not None:
        raise InvalidInputError(
            f"partition_seeds = {raw.partition_seeds} and split = {raw.values['split']}; the file is one "
            "partition: give one of them"
        )
    options = {key: _parse_values(key, value) for key, value in raw.values.items()}
    variants = [expand_values(name) for name in raw.names]
    sweep = SweepSpec(raw.names, variants, options, seeds, partition_seeds, raw.name)
    has_repetitions = raw.seeds is not None or raw.partition_seeds is not None
    return sweep if sweep.is_grid or has_repetitions else None


def _parse_seeds(raw: RawOptions, option: str, first: int) -> list[int]:
    """Return the list of seeds: several as a number or a list, otherwise the single one.

    Args:
        raw: Options from the user.
        option: Name of the single seed, `seed` or `partition_seed`; several have an s.
        first: The first seed if several are given as a number.
    """
    key = f"{option}s"
    several: Any = getattr(raw, key)
    single: Any = raw.values.get(option)
    example = f"{first},{first + 1},{first + 2}"
    if isinstance(single, list) or (isinstance(single, str) and "," in single):
        raise InvalidInputError(f"{option} = {single}; several seeds are --{key.replace('_', '-')} {example}")
    if several is None:
        return [] if single is None else [single]
    if single is not None:
        raise InvalidInputError(f"{option} = {single} and {key} = {several}; give one of them")
    seeds = several
    if isinstance(seeds, str):
        words = [parse_number_or_text(word.strip()) for word in seeds.split(",") if word.strip()]
        seeds = words[0] if len(words) == 1 and "," not in seeds else words
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(first, first + seeds))
    is_valid = isinstance(seeds, list | tuple) and all(type(value) is int and value >= 0 for value in seeds)
    if not is_valid or not seeds or len(set(seeds)) < len(seeds):
        raise InvalidInputError(
            f"{key} = {several}; allowed: a number of seeds, as in 5, or a list, as in {example}"
        )
    return list(seeds)


def expand_values(name: str) -> list[str]:
    """Return a method's variants: `fedavg+dbe(kappa=1,10,mu=1)` has one with kappa=1 and one with kappa=10.

    A value without a key belongs to the key before it.
    """
    parts = re.split(r"(\([^()]*\))", name)
    variants = map(_expand_parentheses, parts)
    return ["".join(combination) for combination in itertools.product(*variants)]


def _expand_parentheses(text: str) -> list[str]:
    """Return the variants of a part in parentheses; any other part is its only variant."""
    if not text.startswith("("):
        return [text]
    alternatives: list[list[str]] = []
    for item in text[1:-1].split(","):
        if "=" in item or not alternatives:
            alternatives.append([item])
        else:
            key = alternatives[-1][0].partition("=")[0]
            alternatives[-1].append(f"{key}={item.strip()}")
    return [f"({','.join(combination)})" for combination in itertools.product(*alternatives)]


def _parse_values(key: str, value: Any) -> Any:
    """Return a list if the option has several values; only options that identify a run may have them."""
    can_vary = identity_of_key(key) != "no"
    if isinstance(value, str) and can_vary and not _FIELDS[key].metadata["has_commas"]:
        words = re.split(r",(?![^()]*\))", value)  # commas outside of parentheses
        if len(words) > 1:
            value = [parse_number_or_text(word.strip()) for word in words]
    if not isinstance(value, list | tuple) or not can_vary:
        return value
    if len(set(map(str, value))) < len(value) or not value:
        raise InvalidInputError(
            f"{key} = {list(value)}; values of a sweep must be different, and at least one"
        )
    return list(value) if len(value) > 1 else value[0]
