"""Every method and combination compared with an independent PyTorch loop: states, statistics, predictions.

There are three variants. `plain`: the methods' defaults, a perceptron, 3 clients, two of them per round.
`local` and `average`: two epochs, half of 4 clients, other options, float64, and a network with BatchNorm
with private or averaged statistics.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from feddbe import seeds
from feddbe.config.options import Config
from feddbe.methods.registry import METHODS
from feddbe.runs.experiment import Experiment, resolve
from feddbe.simulation.client import BUFFER, ClientResult, ClientTask
from feddbe.simulation.engines.base import Broadcasts, ClientStates
from feddbe.simulation.engines.registry import SerialEngine
from feddbe.state import State, drop_keys
from tests.oracles import methods as oracle
from tests.oracles.methods import Predictions, Result, Setting
from tests.small_runs import COMBINATIONS, Outcome, experiment, make_dataset, run_recorded

Oracle = Callable[..., Result]
ORACLES: dict[str, Oracle] = {
    "fedavg": oracle.fedavg,
    "scaffold": oracle.scaffold,
    "fedprox": oracle.fedprox,
    "moon": oracle.moon,
    "perfedavg": oracle.perfedavg,
    "pfedme": oracle.pfedme,
    "ditto": oracle.ditto,
    "fedper": oracle.fedper,
    "fedrep": oracle.fedrep,
    "fedrod": oracle.fedrod,
    "fedbabu": oracle.fedbabu,
    "apfl": oracle.apfl,
    "local": oracle.local,
}
WITH_LARGER_MESSAGES = ("fedgen", "fedfomo", "apple")
"""Methods whose server has more than a model: compared in test_fedgen_fedfomo_apple.py."""
SETTINGS = ("plain", "local", "average")
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "scaffold": {"eta_g": 0.5, "weights": "samples"},
    "fedprox": {"mu": 0.5, "weights": "uniform"},
    "moon": {"mu": 2, "tau": 0.8},
    "fedgen": {"alpha": 0.5, "beta": 2, "decay": 0.9, "diversity": 0.3, "steps": 3, "gen_batch": 16,
               "noise": 8, "hidden": 12, "gen_lr": 0.01, "weights": "uniform"},
    "perfedavg": {"alpha": 0.05, "beta": 0.2, "weights": "uniform"},
    "pfedme": {"lam": 5, "k": 3, "lr_p": 0.05, "eta": 0.02, "beta": 0.5, "weights": "samples"},
    "ditto": {"lam": 0.3, "personal_epochs": 1, "weights": "uniform"},
    "fedper": {"weights": "uniform"},
    "fedrep": {"head_epochs": 3},
    "fedrod": {"weights": "uniform"},
    "fedbabu": {"weights": "uniform"},
    "apfl": {"alpha": 0.3, "weights": "uniform"},
    "fedfomo": {"m": 3, "epsilon": 0.6, "epsilon_decay": 0.1, "held_out": 0.3},
    "apple": {"mu": 1, "eta1": 0.3, "eta2": 0.05, "rounds_l": 3},
    "mr": {"kappa": 2, "mu": 0.1},
    "prbm": {"prbm_lr": 0.05},
    "dbe": {"kappa": 2, "mu": 0.1, "prbm_lr": 0.05},
}  # fmt: skip
"""Options of the second and third variant."""
EXCLUSIVE_OPTIONS = [
    "fedavg(weights=uniform)",
    "moon(contrast=z)+prbm",
    "perfedavg(hessian=free,delta=0.01)",
    "pfedme(evaluate=w)",
    "ditto(mr_target=both)+mr",
    "apfl(adaptive=false)",
]
"""Methods with options that exclude others."""


def combinations(methods: Sequence[str]) -> list[str]:
    """Return each method alone and with every supported add-on; with `+ft` also with DBE."""
    names = [name for name in COMBINATIONS if name.partition("+")[0] in methods]
    return names + [name.replace("+ft", "+dbe+ft") for name in names if name.endswith("+ft")]


def test_every_method_has_an_oracle() -> None:
    """`majority` does not train."""
    assert {*ORACLES, *WITH_LARGER_MESSAGES, "majority"} == METHODS.keys()


def build_batch_norm_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network with two kinds of BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 3, 3, stride=2, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, classes),
    )


def build_perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype; float64 avoids rounding at kinks and ties between labels."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RecordingEngine(SerialEngine):
    """Serial engine that records the clients' predictions."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.predictions: dict[tuple[str, int, int], Predictions] = {}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        rounds = {task.client: task.round for task in tasks}
        for result in super().run(tasks, messages, states):
            for moment, metrics in result.metrics.items():
                key = moment, rounds[result.client] - 1, result.client
                share, samples = metrics["accuracy"]
                self.predictions[key] = Predictions(
                    int(samples), round(share * samples), float(metrics["loss"][0])
                )
            yield result


def parse_name(name: str) -> dict[str, dict[str, Any]]:
    """Parse `a(x=1)+b` into {a: {x: 1}, b: {}}."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    parts = re.findall(r"(\w+)(?:\(([^)]*)\))?", name)
    return {part: {k: value(v) for k, v in re.findall("([^,=]+)=([^,]+)", inside)} for part, inside in parts}


def format_name(parts: dict[str, dict[str, Any]]) -> str:
    """Return the name for parsed parts."""

    def inside(options: dict[str, Any]) -> str:
        return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())

    return "+".join(f"{part}({inside(options)})" for part, options in parts.items())


def oracle_setting(e: Experiment, parts: dict[str, dict[str, Any]]) -> Setting:
    """Return the task for an oracle, without the options of the method itself."""
    method, *addons = parts
    has_mr, has_prbm, has_ft = ({*names} & {*addons} for names in (("mr", "dbe"), ("prbm", "dbe"), ["ft"]))
    options = {k: v for addon in addons for k, v in parts[addon].items()}
    kappa = options.pop("kappa", None)
    dataset, options_of_run = e.task.dataset, e.options
    with seeds.torch_seeded(seeds.torch_seed(e.task.seed, "model")):
        module = (
            build_perceptron() if options_of_run.model == "mlp" else build_batch_norm_model((1, 8, 8), 10)
        )
    assert isinstance(module, nn.Sequential)
    return Setting(
        (module[:-1], module[-1]),
        dataset.x if dataset.x.is_floating_point() else (dataset.x.float() / 16 - 0.5) / 0.5,
        dataset.y,
        e.task.split.train,
        e.task.split.test,
        rounds=e.task.rounds,
        lr=0.1,
        participation=options_of_run.participation,
        seed=options_of_run.seed,
        epochs=options_of_run.local_epochs,
        bn=options_of_run.bn_buffers,
        weights=parts[method].get("weights"),
        kappa=kappa if has_mr else None,
        prbm=bool(has_prbm),
        ft=options_of_run.adapt_epochs if has_ft or method == "fedbabu" else 0,
        **options,
    )


class Comparison(NamedTuple):
    """A run and its oracle, with equal predictions and statistics."""

    e: Experiment
    setting: Setting
    expected: Result
    outcome: Outcome
    clients: dict[int, State]
    """Private states without statistics."""
    atol: float


def run_and_compare(
    name: str,
    variant: str,
    oracle: Oracle,
    folder: Path,
    sizes: Sequence[int] = (60, 44, 28),
    rounds: int = 3,
) -> Comparison:
    """Run both and compare the predictions of all clients, the means, and all statistics."""
    parsed = parse_name(name)
    method = next(iter(parsed))
    run_options: dict[str, Any] = {"rounds": rounds, "participation": 0.67, "seed": 1, "adapt_epochs": 3}
    default_options: dict[str, dict[str, Any]] = {"mr": {"kappa": 1}, "dbe": {"kappa": 1}}
    if variant != "plain":
        sizes, default_options = (60, 44, 28, 24), OTHER_OPTIONS
        run_options |= {"participation": 0.5, "seed": 0, "local_epochs": 2, "bn_buffers": variant}
    if method == "apple":
        run_options["participation"] = 1.0
    parts = {part: default_options.get(part, {}) | options for part, options in parsed.items()}
    is_float64 = variant != "plain" or method == "fedgen"
    with default_dtype(torch.float64 if is_float64 else torch.float32):
        data = make_dataset(sizes)
        if is_float64:
            data = dataclasses.replace(data, x=data.inputs(data.x).double())
        if variant == "plain":
            e = experiment(format_name(parts), data, **run_options)
        else:
            config = Config(partition="natural", lr=0.1, **run_options)
            e = resolve(format_name(parts), config, dataset=data, model=build_batch_norm_model)
        setting = oracle_setting(e, parts)
        expected = oracle(setting, **{k: v for k, v in parts[method].items() if k != "weights"})
        engine = RecordingEngine(e)
        outcome = run_recorded(e, folder, engine)

    atol = 1e-9 if is_float64 else 1e-5
    assert engine.predictions.keys() == setting.predictions.keys()
    for key, predictions in engine.predictions.items():
        assert predictions[:2] == setting.predictions[key][:2], key
        assert predictions.loss == pytest.approx(setting.predictions[key].loss, rel=10 * atol, abs=atol), key
    if setting.z_bar is not None:
        torch.testing.assert_close(outcome.server["mean"], setting.z_bar, rtol=atol, atol=atol)

    def statistics(values: Sequence[Tensor], prefix: str) -> State:
        return {prefix + n: b for n, b in zip(e.task.model.buffers, values, strict=True)}

    clients_in_rounds, averaged = participants(e), variant == "average"
    server = statistics(setting.tracks["shared"][0], BUFFER) if averaged else {}
    assert_close({n: b for n, b in outcome.server.items() if n.startswith(BUFFER)}, server, atol)
    expected_statistics: dict[int, State] = {i: {} for i in clients_in_rounds if expected.private}
    for track, statistics_by_client in setting.tracks.items():
        has_setup = track == "shared" and setting.z_bar is not None
        if variant == "plain" or (averaged and track == "shared"):
            continue
        for i in statistics_by_client if has_setup else clients_in_rounds:
            expected_statistics.setdefault(i, {}).update(
                statistics(statistics_by_client[i], f"{BUFFER}{track}/")
            )
    assert outcome.clients.keys() == expected_statistics.keys()
    clients = {}
    for i, state in outcome.clients.items():
        clients[i] = drop_keys(state, [BUFFER])
        assert_close({n: b for n, b in state.items() if n.startswith(BUFFER)}, expected_statistics[i], atol)
    return Comparison(e, setting, expected, outcome, clients, atol)


def participants(e: Experiment) -> list[int]:
    """Return the clients that took part in any round."""
    n, participation = e.task.split.clients, e.options.participation
    return sorted(
        {
            c
            for t in range(1, e.task.rounds + 1)
            for c in seeds.sample_cohort(e.task.seed, t, n, participation)
        }
    )


def assert_close(actual: State, expected: State, atol: float) -> None:
    """Assert equal names, and equal values up to `atol`."""
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(actual, expected, rtol=atol, atol=atol)


def sort_tensors(state: State, parameters: list[str]) -> list[Tensor]:
    """Return the tensors in the model's order, prefixed names after plain ones, PRBM's vector last."""

    def rank(name: str) -> tuple[int, bool, int]:
        last = name.split("/")[-1]
        return name == "prbm", "/" in name, parameters.index(last) if last in parameters else 0

    return [state[name] for name in sorted(state, key=rank)]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *((name, variant) for name in combinations([*ORACLES]) for variant in SETTINGS),
        *((name, "local") for name in EXCLUSIVE_OPTIONS),
    ],
)
def test_matches_oracle(name: str, variant: str, tmp_path: Path) -> None:
    """Server and private states are equal after three rounds."""
    comparison = run_and_compare(name, variant, ORACLES[next(iter(parse_name(name)))], tmp_path)
    order = list(comparison.e.task.model.parameters)
    server = sort_tensors(drop_keys(comparison.outcome.server, ["mean", "mr/", BUFFER]), order)
    torch.testing.assert_close(server, comparison.expected.server, rtol=comparison.atol, atol=comparison.atol)
    for client, state in comparison.clients.items():
        private = comparison.expected.private.get(client, [])
        torch.testing.assert_close(
            sort_tensors(state, order), private, rtol=comparison.atol, atol=comparison.atol
        )


def test_majority_predicts_the_most_frequent_label(tmp_path: Path) -> None:
    e = experiment("majority", participation=0.67)
    engine = RecordingEngine(e)
    run_recorded(e, tmp_path, engine)
    assert {key[:2] for key in engine.predictions} == {
        (m, t) for m in ("before", "after") for t in range(3)
    } - {("after", 2)}
    y = e.task.dataset.y
    for (_, _, i), predictions in engine.predictions.items():
        train, test = (y[torch.from_numpy(part[i])] for part in (e.task.split.train, e.task.split.test))
        assert predictions[:2] == (len(test), int((test == train.bincount().argmax()).sum()))
