"""Resolved experiments: precedence of defaults, and the content of the configuration's hash."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from feddbe import data
from feddbe.config import defaults
from feddbe.config.options import Config
from feddbe.data.dataset import Dataset
from feddbe.data.federated import label_counts, load_federated_data
from feddbe.data.split import Split
from feddbe.errors import InvalidInputError
from feddbe.methods.addons import MR, Composed
from feddbe.metrics.builtin import majority_accuracy
from feddbe.runs import start
from feddbe.runs.experiment import Experiment, resolve, resolve_all
from feddbe.seeds import torch_seeded
from feddbe.simulation import loop
from tests.small_runs import make_dataset


def images(folder: Path, name: str = "clothes.npz", n: int = 400, *, client: bool = False) -> str:
    """Noise of 28x28 in ten classes; with a client column, five clients of n/5 samples."""
    rng = np.random.RandomState(0)
    arrays: dict[str, Any] = {"x": rng.randint(0, 256, (n, 28, 28)).astype(np.uint8), "y": np.arange(n) % 10}
    if client:
        arrays["client"] = np.repeat(["eve", "bob", "ann", "dan", "cat"], n // 5)
    np.savez(folder / name, **arrays)
    return str(folder / name)


def tiny(
    name: str = "fedavg+dbe", dataset: Dataset | None = None, model: Any = "mlp", **options: Any
) -> Experiment:
    """Three clients with 45, 33 and 21 training samples."""
    if isinstance(model, str):
        options, model = options | {"model": model}, None
    config = Config(**{"partition": "natural", **options})
    return resolve(name, config, dataset=dataset or make_dataset(), model=model)


def mr(experiment: Experiment) -> MR:
    assert isinstance(experiment.method, Composed)
    return next(part for part in experiment.method.addons if isinstance(part, MR))


# --- defaults


def test_defaults_for_digits() -> None:
    experiment = resolve("fedavg+dbe", Config())
    options = experiment.options
    assert (options.lr, options.rounds, options.clients, options.partition) == (0.1, 40, 20, "dirichlet:0.1")
    assert (options.model, options.cut, options.short_batch) == ("cnn_small", "fc1", "keep")
    assert (
        mr(experiment).kappa,
        mr(experiment).mu,
        mr(experiment).init_mean,
        mr(experiment).init_epochs,
    ) == (
        1,
        1,
        "momentum",
        1,
    )
    assert (
        experiment.task.training.lr,
        experiment.task.training.batch_size,
        experiment.task.training.local_epochs,
    ) == (
        0.1,
        10,
        1,
    )
    assert (experiment.task.rounds, experiment.task.seed, experiment.task.split.clients) == (40, 0, 20)
    published = "fc64f7386750e58b651482901f6371da03f86593279935278b802e1caee3cc0c"
    assert experiment.task.split.index_sha256()["train"] == published
    assert 0.3 < experiment.majority_accuracy < 1


def test_defaults_for_images_of_28x28(tmp_path: Path) -> None:
    experiment = resolve("fedavg+dbe", Config(data=images(tmp_path)))
    options = experiment.options
    assert (options.lr, options.rounds, options.clients, options.partition) == (
        0.1, 100, 20, "dirichlet:0.1"
    )  # fmt: skip
    assert (options.model, options.cut) == ("cnn", "fc1")
    assert (mr(experiment).kappa, mr(experiment).mu) == (1, 1)
    assert experiment.task.model.feature_shape == (512,)


def test_defaults_for_features_and_for_a_user_module() -> None:
    x = torch.randn(60, 7)
    table = Dataset("table", x, torch.arange(60) % 3, 3)
    options: dict[str, Any] = {"partition": "iid", "clients": 4}
    features = resolve("fedavg+mr", Config(**options), dataset=table)
    assert (features.options.model, features.options.lr, mr(features).kappa) == ("mlp", 0.1, 1)
    module = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    experiment = resolve("fedavg+mr", Config(**options), dataset=table, model=module)
    assert (experiment.options.model, experiment.options.lr, experiment.options.rounds) == ("own", 0.01, 100)
    assert (experiment.options.cut, mr(experiment).kappa, mr(experiment).mu) == ("1", 1, 1)


def test_variants() -> None:
    """official: as many epochs before round 1 as in a round; paper: the mean over the data, one epoch."""
    variants = {name: mr(tiny(variant=name, local_epochs=3)) for name in ("default", "paper", "official")}
    assert [(v.init_mean, v.init_epochs) for v in variants.values()] == [
        ("momentum", 1), ("exact", 1), ("momentum", 3)
    ]  # fmt: skip
    kept = {name: tiny(variant=name).options.short_batch for name in variants}
    assert kept == {"default": "keep", "paper": "keep", "official": "refuse"}


@pytest.mark.parametrize("variant", ["paper", "official", "early-2023"])
def test_published_variants_have_the_published_rates(variant: str, tmp_path: Path) -> None:
    data = images(tmp_path)

    def rates(method: str) -> tuple[float | None, dict[str, Any]]:
        config = Config(data=data, variant=variant, short_batch="keep", last_test_batch="keep")
        experiment = resolve(method, config)
        assert experiment.settings["lr"].origin == "published for cnn"
        return experiment.options.lr, experiment.config["method_options"]

    lr, parts = rates("fedavg+dbe")
    assert (lr, parts["mr"]["kappa"], parts["mr"]["mu"]) == (0.005, 50, 1)
    assert rates("scaffold")[0] == 0.005
    lr, parts = rates("perfedavg")
    assert (lr, parts["perfedavg"]["alpha"]) == (0.005, 0.005)


def test_default_variant_has_rates_of_methods(tmp_path: Path) -> None:
    data = images(tmp_path)
    assert resolve("scaffold", Config(data=data)).options.lr == 0.02
    assert resolve("scaffold", Config(data=data, lr=0.5)).options.lr == 0.5
    experiment = resolve("perfedavg", Config(data=data))
    assert experiment.options.lr == 0.05
    assert experiment.config["method_options"]["perfedavg"]["alpha"] == 0.02


def test_setting_of_early_2023() -> None:
    """Batches are not shuffled, and the incomplete last batch of test data is not evaluated."""
    early, official = (tiny(variant=name, batch_size=3) for name in ("early-2023", "official"))
    assert (early.options.batch_order, early.options.last_test_batch) == ("fixed", "drop")
    assert (official.options.batch_order, official.options.last_test_batch) == ("shuffled", "keep")
    assert not early.task.training.is_shuffled
    sizes = official.task.split.test.sizes
    assert (sizes % 3).any()
    assert early.task.split.test.sizes.tolist() == (sizes // 3 * 3).tolist()
    for kept, original in zip(early.task.split.test, official.task.split.test, strict=True):
        assert kept.tolist() == original[: len(kept)].tolist()
    assert early.config_hash != official.config_hash
    with pytest.raises(InvalidInputError, match="last_test_batch = drop; no client has 50 test samples"):
        tiny(last_test_batch="drop", batch_size=50)


def test_explicit_options_override_the_variant() -> None:
    experiment = tiny(
        "fedavg+dbe(init_epochs=2,init_mean=debiased,kappa=7)", variant="official", local_epochs=3
    )
    assert (mr(experiment).init_epochs, mr(experiment).init_mean, mr(experiment).kappa) == (2, "debiased", 7)
    assert mr(experiment).mu == 1
    assert mr(tiny("fedavg+mr(init_mean=momentum)", variant="paper")).init_mean == "momentum"
    assert tiny(variant="official", short_batch="keep").options.short_batch == "keep"


def test_precedence_of_explicit_variant_data_and_model_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is removed in turn; hyperparameters have the same order."""

    def resolve_values(
        name: str = "fedavg+mr", **options: Any
    ) -> tuple[float | None, int | None, float | str]:
        experiment = tiny(name, **options)
        return experiment.options.lr, experiment.options.rounds, mr(experiment).kappa

    layers = {
        "variant": (defaults.VARIANTS, "paper", {"lr": 0.3, "rounds": 30, "mr": {"kappa": 30.0}}),
        "data": (defaults.PER_DATA, "tiny", {"lr": 0.2, "rounds": 20, "mr": {"kappa": 20.0}}),
        "model": (defaults.PER_MODEL, "mlp", {"lr": 0.1, "rounds": 10, "mr": {"kappa": 10.0}}),
    }
    for table, key, layer in layers.values():
        monkeypatch.setitem(table, key, layer)
    explicit: dict[str, Any] = {"lr": 0.4, "rounds": 40, "variant": "paper"}
    assert resolve_values("fedavg+mr(kappa=40)", **explicit) == (0.4, 40, 40)
    assert resolve_values(variant="paper") == (0.3, 30, 30)
    assert resolve_values() == (0.2, 20, 20)
    monkeypatch.delitem(defaults.PER_DATA, "tiny")
    assert resolve_values() == (0.1, 10, 10)
    monkeypatch.setitem(defaults.PER_MODEL, "mlp", {"lr": 0.1})
    assert resolve_values() == (0.1, defaults.GENERAL["rounds"], 50)


def test_layers_of_hyper_parameters_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(defaults.PER_MODEL, "mlp", {"lr": 0.1, "mr": {"kappa": 3.0, "mu": 0.5}})
    monkeypatch.setitem(defaults.PER_DATA, "tiny", {"mr": {"kappa": 4.0}})
    parameters = mr(tiny(variant="paper"))
    assert (parameters.kappa, parameters.mu, parameters.init_mean) == (4, 0.5, "exact")


def test_zero_rounds_is_not_a_missing_value() -> None:
    assert tiny(rounds=0).options.rounds == 0
    assert tiny(rounds=0).task.rounds == 0


def test_configuration_contains_every_option() -> None:
    """All options with their defaults filled in, and the hyperparameters part by part."""
    experiment = tiny("fedavg+dbe(mu=0.5)", seed=3, batch_size=5)
    assert experiment.config["method"] == experiment.name == "fedavg+dbe(mu=0.5)"
    assert experiment.config["method_options"]["mr"]["mu"] == 0.5
    assert experiment.config["method_options"]["mr"]["kappa"] == 1
    assert experiment.config["method_options"]["prbm"] == {"prbm_lr": None}
    assert {"fedavg", "mr", "prbm"} == set(experiment.config["method_options"])
    chosen = {
        key: experiment.config[key]
        for key in ("seed", "batch_size", "lr", "rounds", "clients", "model", "cut")
    }
    assert chosen == {
        "seed": 3, "batch_size": 5, "lr": 0.1, "rounds": 100, "clients": 3, "model": "mlp", "cut": "fc1"
    }  # fmt: skip
    assert experiment.config.keys() == {field.name for field in dataclasses.fields(Config)} | {
        "method_options"
    }


def test_unknown_method_is_reported_before_data_is_loaded() -> None:
    with pytest.raises(InvalidInputError, match="unknown method 'fedavgg'"):
        resolve("fedavgg", Config(data="nowhere.npz"))


def test_origin_of_each_setting() -> None:
    origins = {"seed": "given", "batch_size": "run.toml", "local_epochs": "other.toml"}
    options = Config(seed=1, batch_size=9, local_epochs=2, variant="official", partition="iid", clients=3)
    names = ["fedavg+dbe(kappa=7)", "scaffold"]
    first, second = (e.settings for e in resolve_all(names, options, origins=origins))
    origins = {key: setting.origin for key, setting in first.items()}
    assert {key: origins[key] for key in origins} == origins
    expected = {
        "variant": "given", "rounds": "data set digits", "model": "data set digits", "cut": "model cnn_small",
        "lr": "model cnn_small", "participation": "general default", "short_batch": "variant official",
        "mr kappa": "given", "mr init_epochs": "variant official", "mr mu": "general default",
    }  # fmt: skip
    assert {key: origins[key] for key in expected} == expected
    assert first["mr init_epochs"].value == 2
    assert second["lr"] == (0.05, "method scaffold")
    natural = tiny().settings
    assert natural["clients"] == (3, "data set tiny")
    assert tiny(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).settings["lr"].origin == "model own"


def test_origin_of_options_in_names() -> None:
    texts = Dataset(
        "texts", (torch.arange(240) % 12).int().reshape(40, 6), torch.arange(40) % 3, 3, num_words=12
    )
    options: dict[str, Any] = {"partition": "iid", "clients": 2, "batch_size": 5, "variant": "official"}

    def resolve_settings(**more: Any) -> Any:
        return resolve("fedavg", Config(**options, **more), dataset=texts).settings["fasttext rep"]

    assert resolve_settings() == resolve_settings(model="fasttext") == ("logsoftmax", "variant official")
    assert resolve_settings(model="fasttext(rep=linear)") == ("linear", "given")
    assert resolve_settings(model="fasttext( rep = logsoftmax )") == ("logsoftmax", "given")


def test_a_comparison_loads_its_data_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = data.BuiltinDataset.load

    def counted(source: data.BuiltinDataset, data_dir: Path | None) -> Dataset:
        loaded.append(source.name)
        return load(source, data_dir)

    monkeypatch.setattr(data.BuiltinDataset, "load", counted)
    experiments = resolve_all(["fedavg", "fedavg+dbe", "scaffold"], Config(partition="iid", clients=3))
    assert len(loaded) == 1
    assert len({id(e.task.split) for e in experiments}) == len({id(e.task.dataset) for e in experiments}) == 1
    single = resolve("scaffold", Config(partition="iid", clients=3))
    assert (single.config_hash, single.config) == (experiments[2].config_hash, experiments[2].config)


def test_files_with_brackets_in_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists is a file; a name that is known without brackets stays a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos(1).npz", "har(layout=scrambled).npz"):
        images(tmp_path, name, n=40)
        assert load_federated_data(Config(data=name, partition="iid", clients=2)).options.data == name
    rng = np.random.RandomState(0)
    for k in (0, 1):
        (tmp_path / "har(2)" / str(k)).mkdir(parents=True)
        for i in range(4):
            pixels = rng.randint(0, 256, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "har(2)" / str(k) / f"{i}.png")
    assert len(load_federated_data(Config(data="har(2)", partition="iid", clients=2)).dataset) == 8
    source = "from torch import nn\ndef build(shape, classes):\n    return nn.Sequential(nn.Flatten(), "
    (tmp_path / "mine(1).py").write_text(f"{source}nn.Linear(64, 8), nn.Linear(8, classes))\n")
    assert tiny(model="mine(1).py:build").config["model"] == "mine(1).py:build"


# --- the hash

SAME: list[dict[str, Any]] = [
    {"rounds": 7}, {"patience": 5}, {"engine": "pool(workers=2)"}, {"engine": "serial"}, {"out": "there"},
    {"resume": True}, {"json": True}, {"metrics": "loss"},
    {"data_dir": "/data"}, {"lr": 0.1}, {"cut": "fc1"}, {"force": True},
    {"name": "fedavg+dbe(kappa=1)"}, {"name": "FedAvg + mr + prbm"}, {"name": "fedavg+mr(mu=1.0)+prbm"},
]  # fmt: skip
OTHER: list[dict[str, Any]] = [
    {"lr": 0.2}, {"seed": 1}, {"batch_size": 5}, {"local_epochs": 2}, {"participation": 0.5},
    {"cut": "fc1.1"},
    {"model": "cnn_small"}, {"partition": "iid", "clients": 3}, {"partition": "iid", "clients": 4},
    {"bn_buffers": "average"}, {"short_batch": "refuse"}, {"variant": "paper"}, {"variant": "official"},
    {"eval": "cohort"}, {"eval_after": False},
    {"validation": 0.2}, {"new_clients": 1}, {"new_clients": 1, "adaptation": "prbm"}, {"adapt_epochs": 5},
    {"name": "fedavg"}, {"name": "fedavg+mr"}, {"name": "fedavg+prbm"}, {"name": "fedavg+dbe(kappa=2)"},
    {"name": "fedavg+dbe(mu=0.5)"}, {"name": "fedavg+dbe(prbm_lr=0.1)"},
    {"name": "fedavg+dbe(init_epochs=2)"},
]  # fmt: skip


@pytest.mark.parametrize("options", SAME, ids=str)
def test_options_that_keep_the_hash(options: dict[str, Any]) -> None:
    assert tiny(**options).config_hash == tiny().config_hash


def test_all_other_options_change_the_hash() -> None:
    hashes = [tiny().config_hash, *(tiny(**options).config_hash for options in OTHER)]
    twice = [str(options) for options, h in zip(OTHER, hashes[1:], strict=True) if hashes.count(h) > 1]
    assert twice == []


def test_partition_seed_changes_the_hash_only_with_the_split() -> None:
    iid: dict[str, Any] = {"partition": "iid", "clients": 3}
    assert tiny(**iid, partition_seed=2).config_hash != tiny(**iid).config_hash
    # dirichlet with one client and iid differ in name, and in the order of samples
    single_client = tiny(partition="iid", clients=1).config_hash
    assert tiny(partition="dirichlet:1", clients=1).config_hash != single_client


def test_hash_depends_on_content_of_a_file_not_its_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    options: dict[str, Any] = {"partition": "iid", "clients": 4, "model": "mlp"}
    first = resolve("fedavg", Config(data=images(tmp_path, n=40), **options)).config_hash
    moved = images(tmp_path / "a", "other.npz", n=40)
    assert resolve("fedavg", Config(data=moved, **options)).config_hash == first
    with np.load(moved) as arrays:
        x, y = arrays["x"].copy(), arrays["y"].copy()
    x[3, 4, 5] ^= 1
    np.savez(moved, x=x, y=y)
    assert resolve("fedavg", Config(data=moved, **options)).config_hash != first
    x[3, 4, 5] ^= 1
    y[0], y[1] = y[1], y[0]
    np.savez(moved, x=x, y=y)
    assert resolve("fedavg", Config(data=moved, **options)).config_hash != first


def test_saved_split_has_the_hash_of_its_partition(tmp_path: Path) -> None:
    """The file has no order before the 75/25 split, so that must not matter."""
    experiment = tiny()
    experiment.task.split.save(tmp_path / "split.npz")
    loaded = tiny(partition=None, split=str(tmp_path / "split.npz"))
    assert loaded.config_hash == experiment.config_hash
    assert loaded.options.clients == 3
    train = [rows.copy() for rows in experiment.task.split.train]
    train[0][:2] = train[0][1::-1]
    Split.from_arrays(train, experiment.task.split.test).save(tmp_path / "split.npz")
    assert tiny(partition=None, split=str(tmp_path / "split.npz")).config_hash != experiment.config_hash


def test_hash_includes_the_scale_of_images() -> None:
    """The same bytes as 8-bit images are trained with x 2/255 - 1, as digits with x 2/16 - 1."""
    digits = make_dataset()
    assert digits.scale == 2 / 16
    assert tiny(dataset=dataclasses.replace(digits, scale=2 / 255)).config_hash != tiny().config_hash


def test_hash_includes_client_boundaries(tmp_path: Path) -> None:
    hashes = []
    for end in (30, 40):
        train, test = np.split(np.arange(80), [end]), np.split(np.arange(80, 100), [10])
        Split.from_arrays(train, test).save(tmp_path / "split.npz")
        hashes.append(tiny(partition=None, split=str(tmp_path / "split.npz")).config_hash)
    assert hashes[0] != hashes[1]


def test_hash_includes_initial_parameters_of_a_user_module() -> None:
    def module(seed: int) -> nn.Module:
        with torch_seeded(seed):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))

    assert tiny(model=module(0)).config_hash == tiny(model=module(0)).config_hash
    assert tiny(model=module(0)).config_hash != tiny(model=module(1)).config_hash


# --- data and splits


def test_natural_clients_of_a_file(tmp_path: Path) -> None:
    """Five names in the order of the alphabet; each 8 samples: 6 to train, 2 to test."""
    path = images(tmp_path, n=40, client=True)
    experiment = resolve("fedavg", Config(data=path, partition="natural"))
    assert (experiment.options.clients, experiment.options.partition) == (5, "natural")
    assert experiment.task.samples == (6,) * 5
    client_indices = [
        sorted([*a, *b]) for a, b in zip(experiment.task.split.train, experiment.task.split.test, strict=True)
    ]
    starts = {"ann": 16, "bob": 8, "cat": 32, "dan": 24, "eve": 0}
    assert client_indices == [list(range(start, start + 8)) for start in starts.values()]
    # without being asked for, the column is not used
    assert resolve("fedavg", Config(data=path, partition="iid", clients=4)).options.clients == 4


def test_natural_partition_needs_a_client_column() -> None:
    with pytest.raises(InvalidInputError, match="natural"):
        resolve("fedavg", Config(partition="natural"))


def test_number_of_clients_and_partition_are_filled_in() -> None:
    dataset, split, config = load_federated_data(Config(partition="iid", clients=7))
    assert (dataset.name, split.clients, config.clients, config.partition) == ("digits", 7, 7, "iid")
    assert load_federated_data(Config(partition="iid"))[2].clients == 20


def test_split_excludes_contradicting_options(tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    load_federated_data(Config(partition="iid", clients=3))[1].save(path)
    dataset, split, config = load_federated_data(Config(split=str(path)))
    assert (split.clients, config.clients, config.partition) == (3, 3, None)
    assert load_federated_data(Config(split=str(path), clients=3))[1].clients == 3
    with pytest.raises(InvalidInputError, match=r"^clients = 4; '.*split\.npz' has 3$"):
        load_federated_data(Config(split=str(path), clients=4))
    with pytest.raises(InvalidInputError, match="--split and --partition exclude each other"):
        load_federated_data(Config(split=str(path), partition="iid"))
    assert len(dataset) == 1797


def test_a_data_set_in_memory_is_used_instead_of_a_name() -> None:
    dataset = make_dataset()
    assert load_federated_data(Config(data="nowhere", partition="natural"), dataset)[0] is dataset
    assert tiny(dataset=dataset).task.dataset is dataset


def test_paths_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    images(tmp_path, n=40)
    load_federated_data(Config(data="~/clothes.npz", partition="iid", clients=2))[1].save(tmp_path / "s.npz")
    assert load_federated_data(Config(data="~/clothes.npz", split="~/s.npz"))[1].clients == 2


def test_client_smaller_than_a_batch_is_rejected_with_refuse() -> None:
    """45, 33 and 21 training samples."""
    assert tiny(short_batch="refuse", batch_size=21).options.batch_size == 21
    with pytest.raises(InvalidInputError) as caught:
        tiny(short_batch="refuse", batch_size=22)
    assert str(caught.value) == (
        "client 2 has 21 training samples, a batch has 22; short_batch=keep trains it on one short batch"
    )
    with pytest.raises(InvalidInputError, match="client 0 has 45 training samples, a batch has 50"):
        tiny(variant="official", batch_size=50)
    assert tiny(short_batch="keep", batch_size=50).task.training.batch_size == 50


def test_training_settings_reach_the_task() -> None:
    training = tiny(lr=0.3, batch_size=4, local_epochs=2, bn_buffers="average").task.training
    assert (training.lr, training.batch_size, training.local_epochs, training.bn_buffers) == (
        0.3,
        4,
        2,
        "average",
    )


def test_label_counts_of_clients() -> None:
    """Client 0 holds rows 0 1 | 2 with labels 0 2 | 2, client 1 rows 4 | 3 with labels 1 | 1."""
    toy = Dataset("toy", torch.zeros(5, 1), torch.tensor([0, 2, 2, 1, 1]), 4)
    split = Split.from_arrays((np.array([0, 1]), np.array([4])), (np.array([2]), np.array([3])))
    assert label_counts(toy, split).tolist() == [[1, 0, 2, 0], [0, 2, 0, 0]]
    assert label_counts(toy, split).dtype == np.int64


def test_label_counts_of_digits_are_complete() -> None:
    dataset = data.load_dataset("digits")
    counts = label_counts(dataset, load_federated_data(Config(partition="iid", clients=5))[1])
    assert counts.shape == (5, 10)
    assert counts.sum(0).tolist() == np.bincount(dataset.y.numpy()).tolist()
    assert counts.sum(1).tolist() == [360, 360, 359, 359, 359]


# What a method does with the options


def test_ignored_option_is_noted_and_not_recorded() -> None:
    first, second = tiny("pfedme", lr=0.3), tiny("pfedme", lr=0.7)
    assert first.config["lr"] is None
    assert first.config_hash == second.config_hash
    assert first.notes == ["lr has no effect: its rates are lr_p and eta"]
    assert tiny("pfedme").notes == []
    assert tiny("fedavg", lr=0.3).config["lr"] == 0.3
    assert tiny("fedavg", lr=0.3).notes == []
    assert tiny("perfedavg(beta=0.1)", lr=0.3).notes == ["lr has no effect: its rates are alpha and beta"]
    assert tiny("perfedavg(beta=0.1)", lr=0.3, new_clients=1).notes == [], "newcomers train with it"
    assert tiny("apple(eta1=0.1)", lr=0.3).notes == ["lr has no effect: its rates are eta1 and eta2"]
    assert tiny("pfedme+ft", lr=0.3, force=True).notes == [], "fine-tuning trains with it"
    assert tiny("majority", local_epochs=3).notes == ["local_epochs has no effect: it does not train"]


def test_default_rate_of_scaffold_is_noted() -> None:
    digits = Config(data="digits")
    e = resolve("scaffold+dbe", digits)
    assert (e.config["lr"], e.notes) == (0.05, ["lr 0.05 by default, where other methods have 0.1"])
    e = resolve("scaffold+dbe", dataclasses.replace(digits, lr=0.1))
    assert (e.config["lr"], e.notes) == (0.1, [])
    assert resolve("fedavg", digits).config["lr"] == 0.1


def test_majority_accuracy_covers_evaluated_clients() -> None:
    assert tiny("fedavg", new_clients=1).majority_accuracy == pytest.approx(
        majority_accuracy(tiny().task.dataset, tiny().task.split, 2)
    )
    assert tiny("fedavg", new_clients=1).majority_accuracy != tiny("fedavg").majority_accuracy


def test_label_counts_include_validation_rows() -> None:
    """The data picture and a run's document show all that a client holds."""
    whole, held_out = (tiny(validation=share).task for share in (0.0, 0.2))
    assert held_out.split.validation
    assert label_counts(held_out.dataset, held_out.split).tolist() == (
        label_counts(whole.dataset, whole.split).tolist()
    )
    described = start.initial_metadata(tiny(validation=0.2), loop.initial_server_state(tiny(validation=0.2)))
    labels = described["labels"]
    assert np.sum(labels) == len(whole.dataset)
