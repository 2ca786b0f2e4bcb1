"""A relay on 127.0.0.1 that records all bytes inside TLS between nodes and a server, in both directions:

python -m tests.real_federation.relay FEDERATION PORT SERVER_PORT OUTPUT INVITATION...

It has the server's key and the keys of all nodes, which no attacker has. The bytes of each direction are
appended to OUTPUT/NAME-to-server and OUTPUT/NAME-to-node.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from feddbe.federation.certificates import Invitation


class RecordingRelay:
    """The relay; each connection of a node is one to the server."""

    def __init__(self, folder: Path, server_port: int, output_dir: Path, invitations: Sequence[Path]) -> None:
        self.folder, self.server_port, self.output_dir = folder, server_port, output_dir
        self.contexts = dict(self._node_context(path) for path in invitations)

    def _node_context(self, path: Path) -> tuple[str, ssl.SSLContext]:
        """Return a node's name and its TLS settings."""
        invitation = Invitation.read(path)
        key_file = path.with_suffix(".pem")
        key_file.write_bytes(invitation.certificate + invitation.key)
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.load_cert_chain(key_file)
        context.set_alpn_protocols(["h2"])
        return invitation.name, context

    async def serve(self, port: int) -> None:
        """Relay connections for ever."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")
        context.load_verify_locations(self.folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        server = await asyncio.start_server(self._relay, "127.0.0.1", port, ssl=context)
        await server.serve_forever()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        subject = writer.get_extra_info("peercert")["subject"]
        name = dict(pair for pairs in subject for pair in pairs)["commonName"]
        try:
            server_reader, server_writer = await asyncio.open_connection(
                "127.0.0.1", self.server_port, ssl=self.contexts[name]
            )
        except OSError:  # no run is in progress
            writer.close()
            return
        await asyncio.gather(
            self._copy(reader, server_writer, f"{name}-to-server"),
            self._copy(server_reader, writer, f"{name}-to-node"),
        )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: str) -> None:
        try:
            while part := await reader.read(2**16):
                with (self.output_dir / record).open("ab") as file:
                    file.write(part)
                writer.write(part)
                await writer.drain()
        except OSError:  # the other side ended the connection
            pass
        finally:
            writer.close()


if __name__ == "__main__":
    federation, listen_port, server_port, output_dir, *invitations = sys.argv[1:]
    relay = RecordingRelay(Path(federation), int(server_port), Path(output_dir), list(map(Path, invitations)))
    asyncio.run(relay.serve(int(listen_port)))
