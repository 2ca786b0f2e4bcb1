"""Every method and combination against an independent plain loop: states, statistics, and what is predicted.

Three settings. `plain`: the methods' defaults, a perceptron, 3 clients, two of them at a time. `local` and
`average`: two epochs, half of 4 clients, other options, float64, and a network with BatchNorm, whose
statistics are private or averaged.
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
from feddbe.simulation.engines.registry import Serial
from feddbe.state import State, drop_keys
from tests.federation import COMBINATIONS, Outcome, experiment, make_dataset, run_recorded
from tests.oracles import methods as oracle
from tests.oracles.methods import Result, Seen, Setting

Oracle = Callable[..., Result]
PLAIN: dict[str, Oracle] = {
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
EXCHANGING = ("fedgen", "fedfomo", "apple")
"""Their server has more than a model: compared in test_fedgen_fedfomo_apple.py."""
SETTINGS = ("plain", "local", "average")
OTHER: dict[str, dict[str, Any]] = {
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
"""The options of the second and third setting."""
ALONE = [
    "fedavg(weights=uniform)",
    "moon(contrast=z)+prbm",
    "perfedavg(hessian=free,delta=0.01)",
    "pfedme(evaluate=w)",
    "ditto(mr_target=both)+mr",
    "apfl(adaptive=false)",
]
"""Choices that exclude others'."""


def combinations(methods: Sequence[str]) -> list[str]:
    """Each with every add-on that it takes; and, where it is fine-tuned, with DBE as well."""
    names = [name for name in COMBINATIONS if name.partition("+")[0] in methods]
    return names + [name.replace("+ft", "+dbe+ft") for name in names if name.endswith("+ft")]


def test_every_method_has_an_oracle() -> None:
    """majority has nothing to train."""
    assert {*PLAIN, *EXCHANGING, "majority"} == METHODS.keys()


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two kinds of BatchNorm."""
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


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """In float64 a kink of ReLU or of a distance is not met from both sides by rounding alone, and a draw
    between two labels does not happen."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Watched(Serial):
    """The serial engine, which remembers what clients predicted."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment.task, experiment.method)
        self.seen: dict[tuple[str, int, int], Seen] = {}

    def run(
        self, tasks: Sequence[ClientTask], messages: Broadcasts, states: ClientStates
    ) -> Iterator[ClientResult]:
        rounds = {job.client: job.round for job in tasks}
        for reply in super().run(tasks, messages, states):
            for moment, found in reply.metrics.items():
                key = moment, rounds[reply.client] - 1, reply.client
                share, samples = found["accuracy"]
                self.seen[key] = Seen(int(samples), round(share * samples), float(found["loss"][0]))
            yield reply


def read(name: str) -> dict[str, dict[str, Any]]:
    """`a(x=1)+b` -> {a: {x: 1}, b: {}}."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    parts = re.findall(r"(\w+)(?:\(([^)]*)\))?", name)
    return {part: {k: value(v) for k, v in re.findall("([^,=]+)=([^,]+)", inside)} for part, inside in parts}


def written(parts: dict[str, dict[str, Any]]) -> str:
    """The same the other way round."""

    def inside(options: dict[str, Any]) -> str:
        return ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())

    return "+".join(f"{part}({inside(options)})" for part, options in parts.items())


def setting(e: Experiment, parts: dict[str, dict[str, Any]]) -> Setting:
    """The same task for an oracle; the options of the method itself are not in it."""
    method, *addons = parts
    means, vectors, tunes = ({*some} & {*addons} for some in (("mr", "dbe"), ("prbm", "dbe"), ["ft"]))
    options = {k: v for addon in addons for k, v in parts[addon].items()}
    kappa = options.pop("kappa", None)
    dataset, chosen = e.task.dataset, e.options
    with seeds.torch_seeded(seeds.torch_seed(e.task.seed, "model")):
        module = perceptron() if chosen.model == "mlp" else normed((1, 8, 8), 10)
    assert isinstance(module, nn.Sequential)
    return Setting(
        (module[:-1], module[-1]),
        dataset.x if dataset.x.is_floating_point() else (dataset.x.float() / 16 - 0.5) / 0.5,
        dataset.y,
        e.task.split.train,
        e.task.split.test,
        rounds=e.task.rounds,
        lr=0.1,
        join=chosen.participation,
        seed=chosen.seed,
        epochs=chosen.local_epochs,
        bn=chosen.bn_buffers,
        weights=parts[method].get("weights"),
        kappa=kappa if means else None,
        prbm=bool(vectors),
        ft=chosen.adapt_epochs if tunes or method == "fedbabu" else 0,
        **options,
    )


class Compared(NamedTuple):
    """A run and the plain loop, found alike in what they predict and in all statistics."""

    e: Experiment
    plain: Setting
    wanted: Result
    ran: Outcome
    clients: dict[int, State]
    """Their private states without the statistics."""
    atol: float


def compared(
    name: str,
    how: str,
    plain_loop: Oracle,
    folder: Path,
    sizes: Sequence[int] = (60, 44, 28),
    rounds: int = 3,
) -> Compared:
    """Run both and compare: every prediction of every client, the means, and the statistics wherever kept."""
    given = read(name)
    method = next(iter(given))
    run: dict[str, Any] = {"rounds": rounds, "participation": 0.67, "seed": 1, "adapt_epochs": 3}
    usual: dict[str, dict[str, Any]] = {"mr": {"kappa": 1}, "dbe": {"kappa": 1}}
    if how != "plain":
        sizes, usual = (60, 44, 28, 24), OTHER
        run |= {"participation": 0.5, "seed": 0, "local_epochs": 2, "bn_buffers": how}
    if method == "apple":
        run["participation"] = 1.0
    parts = {part: usual.get(part, {}) | options for part, options in given.items()}
    exact = how != "plain" or method == "fedgen"
    with precision(torch.float64 if exact else torch.float32):
        data = make_dataset(sizes)
        if exact:
            data = dataclasses.replace(data, x=data.inputs(data.x).double())
        if how == "plain":
            e = experiment(written(parts), data, **run)
        else:
            chosen = Config(partition="natural", lr=0.1, **run)
            e = resolve(written(parts), chosen, dataset=data, model=normed)
        plain = setting(e, parts)
        wanted = plain_loop(plain, **{k: v for k, v in parts[method].items() if k != "weights"})
        engine = Watched(e)
        ran = run_recorded(e, folder, engine)

    atol = 1e-9 if exact else 1e-5
    assert engine.seen.keys() == plain.seen.keys()
    for key, found in engine.seen.items():
        assert found[:2] == plain.seen[key][:2], key
        assert found.loss == pytest.approx(plain.seen[key].loss, rel=10 * atol, abs=atol), key
    if plain.z_bar is not None:
        torch.testing.assert_close(ran.server["mean"], plain.z_bar, rtol=atol, atol=atol)

    def statistics(values: Sequence[Tensor], prefix: str) -> State:
        return {prefix + n: b for n, b in zip(e.task.model.buffers, values, strict=True)}

    there, averaged = joined(e), how == "average"
    server = statistics(plain.tracks["shared"][0], BUFFER) if averaged else {}
    close({n: b for n, b in ran.server.items() if n.startswith(BUFFER)}, server, atol)
    kept: dict[int, State] = {i: {} for i in there if wanted.private}
    for track, of in plain.tracks.items():
        prepared = track == "shared" and plain.z_bar is not None
        if how == "plain" or (averaged and track == "shared"):
            continue
        for i in of if prepared else there:
            kept.setdefault(i, {}).update(statistics(of[i], f"{BUFFER}{track}/"))
    assert ran.clients.keys() == kept.keys()
    clients = {}
    for i, state in ran.clients.items():
        clients[i] = drop_keys(state, [BUFFER])
        close({n: b for n, b in state.items() if n.startswith(BUFFER)}, kept[i], atol)
    return Compared(e, plain, wanted, ran, clients, atol)


def joined(e: Experiment) -> list[int]:
    """Who took part in a round."""
    n, join = e.task.split.clients, e.options.participation
    return sorted(
        {c for t in range(1, e.task.rounds + 1) for c in seeds.sample_cohort(e.task.seed, t, n, join)}
    )


def close(mine: State, other: State, atol: float) -> None:
    """The same names, and the same values to `atol`."""
    assert mine.keys() == other.keys()
    torch.testing.assert_close(mine, other, rtol=atol, atol=atol)


def in_order(state: State, parameters: list[str]) -> list[Tensor]:
    """The model's order; prefixed names after plain ones, PRBM's vector last (a file sorts by itself)."""

    def rank(name: str) -> tuple[int, bool, int]:
        last = name.split("/")[-1]
        return name == "prbm", "/" in name, parameters.index(last) if last in parameters else 0

    return [state[name] for name in sorted(state, key=rank)]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in combinations([*PLAIN]) for how in SETTINGS),
        *((name, "local") for name in ALONE),
    ],
)
def test_against_the_plain_loop(name: str, how: str, tmp_path: Path) -> None:
    """Server and private state, too, after three rounds, or more than kappa takes to settle."""
    rounds = 3
    found = compared(name, how, PLAIN[next(iter(read(name)))], tmp_path, rounds=rounds)
    order = list(found.e.task.model.parameters)
    server = in_order(drop_keys(found.ran.server, ["mean", "mr/", BUFFER]), order)
    torch.testing.assert_close(server, found.wanted.server, rtol=found.atol, atol=found.atol)
    for client, state in found.clients.items():
        private = found.wanted.private.get(client, [])
        torch.testing.assert_close(in_order(state, order), private, rtol=found.atol, atol=found.atol)


def test_majority_answers_with_the_most_frequent_label(tmp_path: Path) -> None:
    e = experiment("majority", participation=0.67)
    engine = Watched(e)
    run_recorded(e, tmp_path, engine)
    assert {key[:2] for key in engine.seen} == {(m, t) for m in ("before", "after") for t in range(3)} - {
        ("after", 2)
    }
    y = e.task.dataset.y
    for (_, _, i), found in engine.seen.items():
        train, test = (y[torch.from_numpy(part[i])] for part in (e.task.split.train, e.task.split.test))
        assert found[:2] == (len(test), int((test == train.bincount().argmax()).sum()))
