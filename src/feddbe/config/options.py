"""The options of a run: one table for the command line, TOML files and Python.

Each option says all about itself: its section of the help, its part in what a run is, its limits and meaning.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from feddbe.config.parameters import Parameters, parameter, parse_number_or_text
from feddbe.errors import InvalidInputError, one_line, unknown_name

SECTIONS = ("Data", "Model", "Training", "Evaluation", "Run")
Identity = Literal["yes", "content", "seed", "no"]
"""Whether a run with another value is another one. `content`: yes, hashed by what is named rather than by its
name; `seed`: yes, but the same experiment once more; `no`: the same run, done elsewhere or longer."""


def option(
    section: str,
    identity: Identity,
    default: Any,
    meaning: str,
    *,
    value: str = "",
    has_commas: bool = False,
    **limits: Any,
) -> Any:
    """A field of `Config`; `value` is what help calls its value if the type does not say enough. With
    `has_commas` a comma is part of a value and does not separate several."""
    field = parameter(default, meaning, **limits)
    about = {**field.metadata, "section": section, "identity": identity, "value": value}
    about["has_commas"] = has_commas
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Config(Parameters):
    """What a run is asked to be; None means the default for the data and the model."""

    # fmt: off
    method: str = option("Run", "content", "", "name, as in fedavg+dbe(kappa=5,mu=0.1)")
    data: str = option("Data", "content", "digits",
        "data set, or your own: FILE.npz, .csv, .parquet, FOLDER, hf:NAME",
        value="NAME|FILE", has_commas=True)
    data_dir: str | None = option("Data", "no", None, "where data files are looked for first", value="DIR")
    partition: str | None = option("Data", "content", None,
        "iid, dirichlet:BETA, pathological:C or natural")
    partition_seed: int = option("Data", "content", 1,
        "seed of the partition; 1 is the published split", low=0)
    clients: int | None = option("Data", "yes", None, "number of clients N", low=1)
    split: str | None = option("Data", "content", None,
        "FILE.npz with a saved partition, instead of making one", value="FILE", has_commas=True)
    shift: str | None = option("Data", "yes", None,
        "each client's images look different: rotate:30, blur, noise, contrast, invert, or several",
        value="KIND")
    model: str | None = option("Model", "content", None,
        "model, or FILE.py:FUNCTION; by default the one that fits the data")
    cut: str | None = option("Model", "yes", None,
        "where the model is cut; default: before the last linear layer")
    rounds: int | None = option("Training", "no", None, "aggregations", low=0)
    patience: int | None = option("Training", "no", None,
        "stop when the best accuracy is more than this many rounds old", low=1)
    local_epochs: int = option("Training", "yes", 1, "local epochs E", low=1)
    batch_size: int = option("Training", "yes", 10, "batch size B", low=1)
    lr: float | None = option("Training", "yes", None, "learning rate", above=0)
    lr_decay: str | None = option("Training", "yes", None,
        "learning rate over rounds: step:EVERY:FACTOR, cosine or cosine:ROUNDS")
    optimizer: str = option("Training", "yes", "sgd",
        "of local training; begins anew with every round", choices=("sgd", "adam"))
    momentum: float = option("Training", "yes", 0.0, "of SGD", low=0, high=0.999)
    weight_decay: float = option("Training", "yes", 0.0, "pull of the parameters to 0", low=0)
    clip_norm: float | None = option("Training", "yes", None,
        "the norm of a gradient is at most this", above=0)
    participation: float = option("Training", "yes", 1.0,
        "share rho of the clients that take part in a round", above=0, high=1)
    seed: int = option("Training", "seed", 0, "seed of everything but the partition", low=0)
    variant: str = option("Training", "yes", "default",
        "where paper and published code differ", choices=("default", "paper", "official"))
    short_batch: str | None = option("Training", "yes", None,
        "a client smaller than a batch", choices=("keep", "refuse"))
    bn_buffers: str = option("Training", "yes", "local",
        "BatchNorm statistics: private, or averaged", choices=("local", "average"))
    force: bool = option("Training", "no", False, "allow an add-on that the method refuses")
    metrics: str = option("Evaluation", "no", "accuracy,auc,loss",
        "what clients measure, by name; accuracy always", value="NAMES", has_commas=True)
    eval: str = option("Evaluation", "yes", "all",
        "who is evaluated each round: all, cohort or sample:M", value="WHO")
    eval_after: bool = option("Evaluation", "yes", True,
        "evaluate after local training too, which is the default")
    validation: float = option("Evaluation", "yes", 0.0,
        "share of the training data that is held out to choose the best round by", low=0, high=0.9)
    new_clients: int = option("Evaluation", "yes", 0,
        "the last so many clients join when training is over, and adapt", low=0)
    adapt_epochs: int = option("Evaluation", "yes", 10,
        "epochs of fine-tuning at the end (+ft, fedbabu, newcomers)", low=1)
    adaptation: str = option("Evaluation", "yes", "full",
        "how newcomers adapt: as the method trains, or of +prbm by p_i alone, trained or in closed form",
        choices=("full", "prbm", "newton"))
    engine: str = option("Run", "no", "auto", "auto, serial, pool(workers=N), or ray(address=HOST:PORT)")
    device: str = option("Run", "no", "cpu",
        "where clients train: cpu, cuda, cuda:N, mps, or auto; the last bits of results depend on it")
    trainer: str = option("Run", "no", "auto",
        "who trains: auto takes compiled where it can; the last bits of results depend on it",
        choices=("auto", "autograd", "compiled"))
    min_replies: int | None = option("Run", "no", None,
        "replies with which a round goes on if clients do not answer; none: all", low=1)
    worker_timeout: float | None = option("Run", "no", None,
        "seconds after which a worker that does not answer is replaced; none: never", above=0)
    keep_best: bool = option("Run", "no", True,
        "keep the clients' states of the best round, too (for export, measure), which is the default")
    out: str | None = option("Run", "no", None, "folder of the run; default: a new one in runs/", value="DIR")
    resume: bool = option("Run", "no", False,
        "continue the run in --out, or the last one with this configuration")
    json: bool = option("Run", "no", False, "print one JSON document")
    quiet: bool = option("Run", "no", False, "show no progress: no bars, no line per round")
    # fmt: on


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def identity_of_key(key: str) -> Identity:
    """Of a key in a stored configuration; one that is no option (any more) was part of what the run was."""
    found: Identity = _FIELDS[key].metadata["identity"] if key in _FIELDS else "yes"
    return found


def identifying_settings(config: Mapping[str, Any], *, seed: bool = True) -> dict[str, Any]:
    """The settings that tell this run from others (`seed`: from others of the same experiment, too), with the
    hyper-parameters by part and name, as in `mr kappa`."""
    never = ("no",) if seed else ("no", "seed")
    told = {k: v for k, v in config.items() if k != "method_options" and identity_of_key(k) not in never}
    for part, options in config.get("method_options", {}).items():
        told |= {f"{part} {key}": value for key, value in options.items()}
    return told


class RunRequest(NamedTuple):
    """What somebody asked for."""

    names: list[str]
    """The methods."""
    config: Config
    origins: dict[str, str]
    """Where each option came from that was given: a file's name or `given`."""


class RawOptions(NamedTuple):
    """What somebody gave, before it is known to be right."""

    names: list[str]
    values: dict[str, Any]
    origins: dict[str, str]
    seeds: Any = None
    """Several of them: how many, or a list."""

    def request(self) -> RunRequest:
        """With every value checked."""
        if self.seeds is not None:
            raise InvalidInputError(f"seeds = {self.seeds}; this is one run: give one seed, or compare")
        if not self.names:
            raise InvalidInputError("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
        return RunRequest(self.names, Config(**self.values), self.origins)


def parse_options(methods: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> RunRequest:
    """Methods and options from what was given, each checked."""
    return collect_options(methods, options).request()


def collect_options(methods: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> RawOptions:
    """What was given: TOML files among `methods`, over them `options`. Every option is a key of the file with
    the same name; `method` may be a list."""
    names: list[str] = []
    layers: list[tuple[dict[str, Any], str]] = []
    for name in methods:
        if name.endswith(".toml"):
            found = _read_toml(Path(name))
            method = found.pop("method", [])
            names += map(str, method if isinstance(method, list) else [method])
            layers.append((found, name))
        else:
            names.append(name)
    layers.append((_known({k: v for k, v in (options or {}).items() if v is not None}), "given"))
    values = {key: value for found, _ in layers for key, value in found.items()}
    origins = {key: origin for found, origin in layers for key in found}
    if "method" in values:  # from Python
        names = [str(values.pop("method"))]
    return RawOptions(names, values, origins, values.pop("seeds", None))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # its own errors, bad UTF-8, numbers or nesting without end
        raise InvalidInputError(f"'{path}' is not valid TOML: {one_line(error)}") from error
    return _known(values, f"'{path}'")


def _known(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values under the options' own names (`partition-seed` is `partition_seed`)."""
    named = {key.replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in (*_FIELDS, "seeds"):
            raise unknown_name(f"key in {where}:" if where else "option", key, _FIELDS)
    return named


@dataclass(frozen=True)
class SweepSpec:
    """More than one run: every variant of every method, with every combination of values and every seed."""

    methods: list[list[str]]
    """As they were named, each with its variants: fedavg+dbe(kappa=1,10) has two."""
    options: dict[str, Any]
    """A list has several values."""
    seeds: list[int]
    """None: the default."""

    @property
    def varied_options(self) -> list[str]:
        """Options with several values."""
        return [k for k, v in self.options.items() if isinstance(v, list) and identity_of_key(k) != "no"]

    @property
    def is_grid(self) -> bool:
        """Whether there is something to choose from."""
        return bool(self.varied_options) or any(len(variants) > 1 for variants in self.methods)


def parse_sweep(raw: RawOptions) -> SweepSpec | None:
    """What was given, if it is more than one run of each method; None: it is not."""
    options = {key: _values(key, value) for key, value in raw.values.items()}
    found = SweepSpec([expand_values(name) for name in raw.names], options, parse_seeds(raw))
    return found if found.is_grid or raw.seeds is not None else None


def parse_seeds(raw: RawOptions) -> list[int]:
    """`seeds`: how many (5 is 0 to 4), or a list; without it the one `seed`, or none if it was not given."""
    seeds: Any = raw.seeds
    seed: Any = raw.values.get("seed")
    if isinstance(seed, list) or (isinstance(seed, str) and "," in seed):
        raise InvalidInputError(f"seed = {seed}; several seeds are --seeds 0,1,2")
    if seeds is None:
        return [] if seed is None else [seed]
    if seed is not None:
        raise InvalidInputError(f"seed = {seed} and seeds = {seeds}; give one of them")
    if isinstance(seeds, str):
        words = [parse_number_or_text(word.strip()) for word in seeds.split(",") if word.strip()]
        seeds = words[0] if len(words) == 1 and "," not in seeds else words
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    whole = isinstance(seeds, list | tuple) and all(type(one) is int and one >= 0 for one in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise InvalidInputError(f"seeds = {raw.seeds}; allowed: how many, as in 5, or which, as in 0,1,2")
    return list(seeds)


def expand_values(name: str) -> list[str]:
    """`fedavg+dbe(kappa=1,10,mu=1)` -> with kappa=1, and with kappa=10; a value without a key belongs to the
    key before it."""
    parts = re.split(r"(\([^()]*\))", name)
    choices = [_brackets(part) if part.startswith("(") else [part] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _brackets(text: str) -> list[str]:
    found: list[list[str]] = []
    for item in text[1:-1].split(","):
        if "=" in item or not found:
            found.append([item])
        else:
            key = found[-1][0].partition("=")[0]
            found[-1].append(f"{key}={item.strip()}")
    return [f"({','.join(chosen)})" for chosen in itertools.product(*found)]


def _values(key: str, value: Any) -> Any:
    """A list if there are several; only what makes another run can have them."""
    field = {field.name: field for field in dataclasses.fields(Config)}[key]
    has_commas = field.metadata["has_commas"]
    if isinstance(value, str) and not has_commas and len(words := _outside_brackets(value)) > 1:
        value = (
            [parse_number_or_text(word.strip()) for word in words] if identity_of_key(key) != "no" else value
        )
    if not isinstance(value, list | tuple) or identity_of_key(key) == "no":  # then a list is a mistake
        return value
    if len(set(map(str, value))) < len(value) or not value:
        raise InvalidInputError(f"{key} = {list(value)}; several values are all different, and at least one")
    return list(value) if len(value) > 1 else value[0]


def _outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^()]*\))", text)
