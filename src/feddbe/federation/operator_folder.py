"""The operator's folder of a federation: settings, form of the data, admitted nodes, and the last status.

It has `federation.toml` (host, port, and address on which the server listens), `data.json` (`data_spec.py`),
`ca.pem`, `ca.key`, `server.pem` and `server.key` (`certificates.py`), and `status.json` (connected nodes, and
the folder of the last run). `nodes/NAME.sha256` is the fingerprint of an admitted node's certificate, and
`nodes/NAME.json` its last summary of its data.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from feddbe.errors import FeddbeError, InvalidInputError, truncate
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.node import NodeSummary
from feddbe.paths import read_json_file, read_text_file

_NAME = re.compile("[a-z0-9][a-z0-9_-]{0,39}")


@dataclass(frozen=True)
class FederationFolder:
    """The folder of an existing federation."""

    path: Path
    host: str
    """Name or address by which nodes reach the server."""
    port: int
    listen: str
    """Address on which the server listens."""

    @classmethod
    def create(cls, path: Path, host: str, port: int, listen: str, spec: DataSpec) -> FederationFolder:
        """Create the folder, which only its owner can read, with its certificates.

        Raises:
            InvalidInputError: The folder exists and has files, or cannot be written.
        """
        from feddbe.federation.certificates import make_authority

        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidInputError(f"'{path}' exists and is not empty; choose another folder")
        for option, value in {"--host": host, "--listen": listen}.items():
            if not re.fullmatch(r"[A-Za-z0-9.:_-]+", value):
                raise InvalidInputError(f"{option} {truncate(value)}: expected a host name or an address")
        try:
            (path / "nodes").mkdir(mode=0o700, parents=True)
            path.chmod(0o700)
            make_authority(path, list(dict.fromkeys([host, "127.0.0.1", "localhost"])))
            settings = f'host = "{host}"\nport = {port}\nlisten = "{listen}"\n'
            (path / "data.json").write_text(json.dumps(spec.to_json()), encoding="utf-8")
            (path / "federation.toml").write_text(settings, encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"cannot write '{path}': {error.strerror}") from None
        return cls(path, host, port, listen)

    @classmethod
    def open(cls, path: Path) -> FederationFolder:
        """Return the federation in this folder.

        Raises:
            InvalidInputError: The folder is not a federation.
        """
        try:
            settings = tomllib.loads(read_text_file(path / "federation.toml"))
            return cls(path, str(settings["host"]), int(settings["port"]), str(settings["listen"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInputError(
                f"'{path}' is not a federation; create one: feddbe federation init DIR --host H --like DATA"
            ) from None

    def data_spec(self) -> DataSpec:
        """Return the form of the data."""
        try:
            return DataSpec.from_json(read_json_file(self.path / "data.json"))
        except (OSError, ValueError):
            raise InvalidInputError(
                f"'{self.path / 'data.json'}' is damaged; create the federation again"
            ) from None

    @property
    def server_address(self) -> str:
        """Address of the server for nodes."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def listen_address(self) -> str:
        """Address on which the server listens."""
        return f"[{self.listen}]:{self.port}" if ":" in self.listen else f"{self.listen}:{self.port}"

    # --- nodes

    def node_names(self) -> list[str]:
        """Return the names of the admitted nodes, sorted."""
        return sorted(path.stem for path in (self.path / "nodes").glob("*.sha256"))

    def require_new_name(self, name: str) -> None:
        """Raise an error if a node cannot have this name, or is invited already."""
        require_node_name(name)
        if name in self.node_names():
            raise InvalidInputError(
                f"'{name}' is invited already; feddbe federation remove {self.path} {name} revokes that"
            )

    def invite(self, name: str, output_dir: Path) -> Path:
        """Admit a node; write its invitation, which only the owner can read, and return the path.

        Raises:
            InvalidInputError: The name is not allowed, or is invited already.
        """
        from feddbe.federation.certificates import make_invitation

        self.require_new_name(name)
        invitation, fingerprint = make_invitation(self.path, name, self.server_address, self.data_spec())
        path = output_dir / f"{name}.invitation"
        invitation.write(path)
        (self.path / "nodes" / f"{name}.sha256").write_text(fingerprint, encoding="utf-8")
        return path

    def remove(self, name: str) -> None:
        """Revoke the invitation of a node, which is rejected when it connects again."""
        if name not in self.node_names():
            known = ", ".join(self.node_names()) or "none"
            raise InvalidInputError(f"no node '{truncate(name)}' in '{self.path}'; nodes: {known}")
        for suffix in ("sha256", "json"):
            (self.path / "nodes" / f"{name}.{suffix}").unlink(missing_ok=True)

    def find_node(self, fingerprint: str) -> str | None:
        """Return the admitted node with this certificate, or None."""
        for name in self.node_names():
            with suppress(FileNotFoundError):  # it is removed at this moment
                if (self.path / "nodes" / f"{name}.sha256").read_text(encoding="utf-8") == fingerprint:
                    return name
        return None

    def write_summary(self, name: str, summary: NodeSummary) -> None:
        """Store the last summary of a node's data, so that a run can start while the node is away."""
        path = self.path / "nodes" / f"{name}.json"
        _write_json(path, dataclasses.asdict(summary))

    def read_summary(self, name: str) -> NodeSummary | None:
        """Return the last summary of a node's data, or None if it never connected."""
        try:
            return NodeSummary.from_json(read_json_file(self.path / "nodes" / f"{name}.json"))
        except (OSError, ValueError, FeddbeError):
            return None

    # --- the run

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one run at a time use this federation.

        Raises:
            InvalidInputError: Another run is in progress.
        """
        lock = self._lock()
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InvalidInputError(
                f"another run of '{self.path}' is in progress; wait for it, or compare several methods in one"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def is_in_use(self) -> bool:
        """Return True if a run is in progress."""
        lock = self._lock()
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def _lock(self) -> FileLock:
        return FileLock(self.path / "lock")

    def write_status(self, nodes: Mapping[str, float], run: Path | None) -> None:
        """Store the connected nodes, with the time since when, and the folder of the run."""
        folder = None if run is None else str(run.resolve())
        _write_json(self.path / "status.json", {"nodes": dict(nodes), "run": folder})

    def read_status(self) -> tuple[dict[str, float], Path | None]:
        """Return the values of `write_status`; no nodes and None before the first run."""
        try:
            status = read_json_file(self.path / "status.json")
            nodes = {str(name): float(since) for name, since in status["nodes"].items()}
            return nodes, Path(status["run"]) if status["run"] else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, None


def require_node_name(name: str) -> None:
    """Raise an error if a node cannot have this name."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"name '{truncate(name)}': expected lower-case letters, digits, - and _, at most 40"
        )


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")  # connections have their own thread
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)
