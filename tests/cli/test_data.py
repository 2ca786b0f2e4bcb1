"""`feddbe data list`, `get` and `show`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.shell import Shell


def test_list_names_location_of_every_data_set(shell: Shell) -> None:
    rows = {row["name"]: row for row in shell.json("data list")["data"]}
    assert rows["digits"]["location"] == "in scikit-learn"
    assert rows.keys() >= {"digits", "fmnist"}
    out = shell("data list").out
    assert all(row["description"] in out for row in rows.values())


def test_get_of_installed_data_prints_its_location(shell: Shell) -> None:
    assert shell("data get digits") == (0, "digits: in scikit-learn\n", "")


def test_show_saves_and_draws_a_partition_that_can_be_loaded(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("data show digits --clients 4 --partition iid --save saved.npz --plot saved.svg")
    assert (code, err) == (0, "")
    assert out.endswith("saved.npz\nsaved.svg\n")
    assert "<svg" in (tmp_path / "saved.svg").read_text()
    created = shell.json("data show digits --clients 4 --partition iid")
    assert created.keys() == {"clients", "index_sha256"}
    assert created["index_sha256"].keys() == {"parts", "train", "test"}
    assert [client.keys() for client in created["clients"]] == [{"train", "test", "labels"}] * 4
    assert sum(client["train"] + client["test"] for client in created["clients"]) == 1797
    assert sum(sum(client["labels"]) for client in created["clients"]) == 1797
    loaded = shell.json("data show digits --split saved.npz")
    assert loaded["clients"] == created["clients"]
    assert loaded["index_sha256"] == {**created["index_sha256"], "parts": None}


def test_show_describes_the_shift_of_each_client(shell: Shell) -> None:
    clients = shell.json("data show digits --clients 2 --shift rotate:30")["clients"]
    assert all(client["shift"].startswith("rotate ") for client in clients)


def test_show_leaves_out_small_clients_like_a_run(shell: Shell, tmp_path: Path) -> None:
    rows = [f"{index},{index % 2},{'Ulm' if index < 8 else 'Bern'}" for index in range(10)]
    (tmp_path / "towns.csv").write_text("\n".join(["x,y,client", *rows]))
    _, out, err = shell("data show towns.csv --min-samples 5")
    assert (err, "Ulm" in out, "1 of 2 clients were left out" in out) == ("", True, True)
    code, _, err = shell("data show towns.csv --min-samples 5 --save saved.npz")
    assert (code, "a saved partition is that of all rows" in err) == (2, True)
    assert not (tmp_path / "saved.npz").exists()
