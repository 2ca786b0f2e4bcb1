"""`feddbe federation`: commands of the operator and of the nodes of a federation."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from feddbe.cli.base import AS_JSON, Argument, Group, print_json, sigterm_as_interrupt
from feddbe.errors import InvalidInputError, truncate

if TYPE_CHECKING:
    from feddbe.federation.operator_folder import FederationFolder

group = Group("federation", "Create a federation, invite nodes, take part as a node.")
_FOLDER = click.argument("folder", cls=Argument, metavar="DIR", type=Path, help="folder of the federation")
_STATE = click.option(
    "--state", required=True, metavar="FOLDER", type=Path,
    help="folder of the node's private states; join creates it",
)  # fmt: skip


def _require_packages() -> None:
    """Raise an error if a package of the extra `federation` is not installed."""
    for name in ("cryptography", "grpc"):
        if importlib.util.find_spec(name) is None:
            raise InvalidInputError(
                f"a federation needs {name}; install it with: pip install 'feddbe[federation]'"
            )


def _open(folder: Path) -> FederationFolder:
    _require_packages()
    from feddbe.federation.operator_folder import FederationFolder

    return FederationFolder.open(folder)


@group.command("init")
@_FOLDER
@click.option("--host", required=True, metavar="HOST", help="name or address of the server for nodes")
@click.option(
    "--like",
    required=True,
    metavar="DATA",
    help="example of the nodes' data, in any form that run --data takes",
)
@click.option(
    "--port",
    default=8443,
    metavar="N",
    type=click.IntRange(1, 65535),
    help="port of the server [default: 8443]",
)
@click.option(
    "--listen", default="0.0.0.0", metavar="ADDRESS", help="address to listen on [default: 0.0.0.0]"
)
def _init(folder: Path, host: str, like: str, port: int, listen: str) -> int:
    """Operator: create a federation: certificates, settings, and the form of the data."""
    _require_packages()
    from feddbe.federation.data_spec import DataSpec
    from feddbe.federation.operator_folder import FederationFolder

    spec = DataSpec.from_example(like)
    FederationFolder.create(folder, host, port, listen, spec)
    labels = ", ".join(spec.labels)
    print(f"inputs  {spec.preprocessing.kind} of shape {spec.preprocessing.shape}, {spec.dtype}")
    print(f"labels  {truncate(labels)}")
    print(f"next    feddbe federation invite {folder} NAME...")
    return 0


@group.command("invite")
@_FOLDER
@click.argument("names", cls=Argument, nargs=-1, required=True, metavar="NAME...", help="names of the nodes")
def _invite(folder: Path, names: tuple[str, ...]) -> int:
    """Operator: write NAME.invitation for each node, to be sent like a password."""
    federation = _open(folder)
    for name in names:
        federation.require_new_name(name)  # all of them, before one is invited
    for name in names:
        print(f"{federation.invite(name, Path())}: whoever has this file can connect as '{name}'")
    return 0


@group.command("remove")
@_FOLDER
@click.argument("name", cls=Argument, help="name of the node")
def _remove(folder: Path, name: str) -> int:
    """Operator: revoke an invitation; the node is refused when it connects again."""
    _open(folder).remove(name)
    print(f"'{name}' is removed")
    return 0


@group.command("join")
@click.argument("invitation", cls=Argument, metavar="FILE", type=Path, help="NAME.invitation of the operator")
@click.option(
    "--data", required=True, metavar="DATA", help="the node's own data, in any form that run --data takes"
)
@_STATE
@click.option(
    "--methods", default="", metavar="NAMES", help="methods to take part in [default: all built-in]"
)
@click.option(
    "--allow-file", multiple=True, metavar="FILE.py",
    help="file with a method or model that the server may request by its content; may be repeated",
)  # fmt: skip
def _join(invitation: Path, data: str, state: Path, methods: str, allow_file: tuple[str, ...]) -> int:
    """Node: take part in the federation's runs until Ctrl-C. The private state stays in --state."""
    _require_packages()
    import logging

    from feddbe.federation.certificates import Invitation
    from feddbe.federation.grpc_transport import serve_node
    from feddbe.federation.node import open_node

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%F %T")
    logging.getLogger("feddbe.federation").setLevel(logging.INFO)
    opened = Invitation.read(invitation)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    with sigterm_as_interrupt(), open_node(state, data, opened.data_spec, names, allow_file) as node:
        summary = node.summary
        print(f"node '{opened.name}': {summary.train} training and {summary.test} test samples", flush=True)
        serve_node(opened, node)
    return 0


@group.command("flower")
@_FOLDER
def _flower(folder: Path) -> int:
    """Operator: write the app that `flwr run` starts on an existing Flower deployment."""
    federation = _open(folder)
    from feddbe.federation.flower import write_app

    app = write_app(federation)
    print(f"app     {app}")
    print(f'next    flwr run {app} --run-config \'nodes="NAME NAME" command="run fedavg+dbe"\'')
    return 0


@group.command("status")
@_FOLDER
@AS_JSON
def _status(folder: Path, as_json: bool) -> int:
    """Operator: print the nodes, and the run that is in progress or was the last."""
    federation = _open(folder)
    connected, run = federation.read_status()
    is_running = federation.is_in_use()
    nodes: dict[str, float | None] = dict.fromkeys(federation.node_names())
    if is_running:
        nodes |= {name: connected[name] for name in nodes if name in connected}
    description = _describe_run(run, is_running=is_running) if run else None
    if as_json:
        print_json({"nodes": nodes, "run": description})
        return 0
    for name, since in nodes.items():
        text = "not connected"
        if since is not None:
            text = f"connected since {time.strftime('%F %T', time.localtime(since))}"
        print(f"{name:20} {text}")
    if description:
        accuracy = description["accuracy"]
        accuracy_text = "" if accuracy is None else f", accuracy {100 * accuracy:.2f} %"
        print(
            f"{description['folder']}: {description['method']}, round {description['round']} of "
            f"{description['rounds']}{accuracy_text}; {description['status']}"
        )
    return 0


def _describe_run(folder: Path, *, is_running: bool) -> dict[str, Any]:
    """Return the state of a run from its file."""
    from feddbe.results.document import status_note
    from feddbe.runs.build_document import load_document
    from feddbe.runs.store import RunStore

    if not RunStore.is_run(folder):
        status = "waiting for the first round" if is_running else "stopped before the first round"
        return {
            "folder": str(folder),
            "method": "",
            "round": 0,
            "rounds": 0,
            "accuracy": None,
            "status": status,
        }
    document = load_document(folder, hashes=False)
    rounds, requested = document["rounds"], document["config"]["rounds"]
    last = rounds[-1]["round"] if rounds else 0
    evaluated = [result["accuracy"] for result in rounds if result["accuracy"]]
    status = status_note(document)
    if not status:
        status = "finished" if last >= requested else "stopped; --resume continues"
        status = "in progress" if is_running else status
    return {
        "folder": str(folder),
        "method": document["method"],
        "round": last,
        "rounds": requested,
        "accuracy": evaluated[-1]["weighted"] if evaluated else None,
        "status": status,
    }


@group.command("export")
@click.argument(
    "run", cls=Argument, required=False, metavar="[RUN]", help="identifier of a run [default: last]"
)
@_STATE
@click.option("-o", "--out", metavar="DIR", type=Path, help="output folder [default: RUN-client-N]")
@click.option("--onnx", is_flag=True, help="write ONNX too (pip install 'feddbe[onnx]')")
def _export(run: str | None, state: Path, out: Path | None, onnx: bool) -> int:
    """Node: export its own model of a run that has ended, without the server."""
    from feddbe.export import write_client_model
    from feddbe.federation.node import reopen_node

    with reopen_node(state) as node:
        client_model = node.load_model(run or node.last_run())
        folder = write_client_model(client_model, out, onnx=onnx)
    description = client_model.description
    print(
        f"{truncate(description['method'])}, run {description['run']}, round {description['round']}: "
        f"accuracy {100 * description['accuracy']:.2f} % on the node's {description['test_rows']} test rows"
    )
    print(f"model   {folder}")
    return 0
