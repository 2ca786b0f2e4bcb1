"""The federation's own certificate authority, the server's certificate, and the invitations of nodes."""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from feddbe.errors import InvalidInputError, truncate
from feddbe.federation.data_spec import DataSpec
from feddbe.federation.private_store import write_private_file
from feddbe.paths import read_json_file

DAYS = 730
"""Days for which certificates are valid."""
_ISSUER = "feddbe federation"
_PEM = serialization.Encoding.PEM
_UNUSED = (
    "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
    "decipher_only",
)  # fmt: skip


@dataclass(frozen=True)
class Invitation:
    """Everything that a node needs to connect: whoever has it can connect as this node."""

    name: str
    server: str
    """Address of the server."""
    authority: bytes
    certificate: bytes
    key: bytes
    data_spec: DataSpec

    def write(self, path: Path) -> None:
        """Write the invitation to a file that only its owner can read."""
        values: dict[str, Any] = {"version": 1, "name": self.name, "server": self.server}
        values |= {key: getattr(self, key).decode() for key in ("authority", "certificate", "key")}
        content = json.dumps(values | {"data": self.data_spec.to_json()}, indent=1).encode()
        try:
            write_private_file(path, content)
        except OSError as error:
            raise InvalidInputError(f"cannot write '{path}': {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Return the invitation in a file.

        Raises:
            InvalidInputError: The file is not an invitation.
        """
        try:
            values = read_json_file(path)
            authority, certificate, key = (
                str(values[name]).encode() for name in ("authority", "certificate", "key")
            )
            public_key = x509.load_pem_x509_certificate(certificate).public_key()
            x509.load_pem_x509_certificate(authority)
            if serialization.load_pem_private_key(key, None).public_key() != public_key:
                raise ValueError("the key is not that of the certificate")
            spec = DataSpec.from_json(values["data"])
            name, server = truncate(values["name"]), truncate(values["server"])  # they are printed
            return cls(name, server, authority, certificate, key, spec)
        except (OSError, ValueError, KeyError, TypeError, UnsupportedAlgorithm) as error:
            reason = error.strerror if isinstance(error, OSError) else "its content is not one"
            raise InvalidInputError(
                f"'{path}' is not an invitation ({reason}); ask the operator of the federation for one"
            ) from None


def make_authority(folder: Path, hosts: Sequence[str]) -> None:
    """Write ca.pem, ca.key, server.pem and server.key; the server's certificate is for these hosts."""
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (folder / "ca.pem").write_bytes(_certificate(_ISSUER, authority, authority).public_bytes(_PEM))
    (folder / "server.pem").write_bytes(_certificate(hosts[0], server, authority, hosts).public_bytes(_PEM))
    write_private_file(folder / "ca.key", _private_bytes(authority))
    write_private_file(folder / "server.key", _private_bytes(server))


def make_invitation(folder: Path, name: str, server: str, spec: DataSpec) -> tuple[Invitation, str]:
    """Return a new invitation and the fingerprint of its certificate.

    Args:
        folder: Folder with the authority's files.
        name: Name of the node.
        server: Address of the server.
        spec: Form of the federation's data.
    """
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    pem = _certificate(name, key, authority, [name], is_client=True).public_bytes(_PEM)
    invitation = Invitation(name, server, (folder / "ca.pem").read_bytes(), pem, _private_bytes(key), spec)
    return invitation, fingerprint(pem)


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str] = (),
    *,
    is_client: bool = False,
) -> x509.Certificate:
    """Return a certificate of the server or a node; without hosts, that of the authority."""
    is_authority = not hosts
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])]) for text in (name, _ISSUER)
    )
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(_UNUSED, False),
    )
    own_identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer_identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=DAYS))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(own_identifier, critical=False)
        .add_extension(issuer_identifier, critical=False)
    )
    if hosts:
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if is_client else ExtendedKeyUsageOID.SERVER_AUTH
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
