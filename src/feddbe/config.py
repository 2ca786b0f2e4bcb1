"""The options of a run: one table for the command line, TOML files and Python."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddbe.errors import BadInput, unknown
from feddbe.options import Parameters, parameter

__all__ = ["Config", "read"]


@dataclass(frozen=True)
class Config(Parameters):
    """What a run is asked to be; None means the default for the data and the model."""

    method: str = parameter("", "name, as in fedavg+dbe(kappa=5,mu=0.1)")
    data: str = parameter("digits", "data set, or your own: FILE.npz, .csv, .parquet, FOLDER, hf:NAME")
    data_dir: str | None = parameter(None, "where data files are looked for first")
    partition: str | None = parameter(None, "iid, dirichlet:BETA, pathological:C or natural")
    partition_seed: int = parameter(1, "seed of the partition; 1 is the published split", low=0)
    split: str | None = parameter(None, "FILE.npz with a saved partition, instead of making one")
    clients: int | None = parameter(None, "number of clients N", low=1)
    har_layout: str | None = parameter(
        None, "HAR's windows: one signal per channel, or as published", choices=("channels", "scrambled")
    )
    model: str | None = parameter(None, "model, or FILE.py:FUNCTION; by default the one that fits the data")
    cut: str | None = parameter(None, "where the model is cut; default: before the last linear layer")
    fasttext_rep: str | None = parameter(
        None,
        "fastText's representation: the hidden layer, or as published its log-softmax",
        choices=("linear", "logsoftmax"),
    )
    rounds: int | None = parameter(None, "aggregations", low=0)
    patience: int | None = parameter(
        None, "stop when the best accuracy is more than this many rounds old", low=1
    )
    epochs: int = parameter(1, "local epochs E", low=1)
    batch: int = parameter(10, "batch size B", low=1)
    lr: float | None = parameter(None, "learning rate", above=0)
    join: float = parameter(1.0, "share rho of the clients that take part in a round", above=0, high=1)
    seed: int = parameter(0, "seed of everything but the partition", low=0)
    variant: str = parameter(
        "default", "where paper and published code differ", choices=("default", "paper", "official")
    )
    measure: str = parameter("accuracy,auc,loss", "what clients measure, by name; accuracy always")
    eval: str = parameter("all", "who is evaluated each round: all, cohort or sample:M")
    eval_after: bool = parameter(True, "evaluate after local training too, which is the default")
    validation: float = parameter(
        0.0, "share of the training data that is held out to choose the best round by", low=0, high=0.9
    )
    newcomers: int = parameter(0, "the last so many clients join when training is over, and adapt", low=0)
    adapt_epochs: int = parameter(10, "epochs of fine-tuning at the end (+ft, fedbabu, newcomers)", low=1)
    train_loss: str = parameter(
        "training",
        "loss of the batches trained on, or of a pass over the training data",
        choices=("training", "pass"),
    )
    bn_buffers: str = parameter(
        "local", "BatchNorm statistics: private, or averaged", choices=("local", "average")
    )
    short_batch: str | None = parameter(None, "a client smaller than a batch", choices=("keep", "refuse"))
    engine: str = parameter("auto", "auto, serial, pool or pool:N")
    min_replies: int | None = parameter(
        None, "replies with which a round goes on if clients do not answer; none: all", low=1
    )
    out: str | None = parameter(None, "folder of the run; default: a new one in runs/")
    resume: bool = parameter(False, "continue the run in --out, or the last one with this configuration")
    force: bool = parameter(False, "allow an add-on that the method refuses")
    json: bool = parameter(False, "print one JSON document")


def read(
    methods: Sequence[str] = (), options: Mapping[str, Any] | None = None, settings: Sequence[str] = ()
) -> tuple[list[str], Config]:
    """Methods and options from what was given: TOML files among `methods`, over them `settings` (key=value),
    over them `options`. Every option is a key of the file with the same name; `method` may be a list."""
    names: list[str] = []
    values: dict[str, Any] = {}
    for name in methods:
        if name.endswith(".toml"):
            found = _read_toml(Path(name))
            given = found.pop("method", [])
            names += map(str, given if isinstance(given, list) else [given])
            values |= found
        else:
            names.append(name)
    for item in settings:
        key, equals, text = item.partition("=")
        if not equals:
            raise BadInput(f"--set {item}: write it as --set key=value")
        values |= _known({key.strip(): _toml_value(text.strip())}, f"--set {item}")
    values |= _known({k: v for k, v in (options or {}).items() if v is not None})
    if "method" in values:  # --set method=... or Python
        names = [str(values.pop("method"))]
    if not names:
        raise BadInput("no method given; name one, as in fedavg+dbe (feddbe methods lists them)")
    return names, Config(**values)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"'{path}' is not valid TOML: {error}") from error
    return _known(values, f"'{path}'")


def _known(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values under the options' own names (`partition-seed` is `partition_seed`)."""
    keys = {field.name for field in dataclasses.fields(Config)}
    named = {key.replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in keys:
            raise unknown(f"key in {where}:" if where else "option", key, keys)
    return named


def _toml_value(text: str) -> Any:
    """5 is a number, true a boolean, everything else text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
