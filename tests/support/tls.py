"""Certificates made on the spot: an authority, what it signs, and a TLS front before a plain server."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.faults import HOST, PIECE_BYTES


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def file(self) -> Path:
        """Its certificate, as `ca_file` and SSL_CERT_FILE take it."""
        return self.folder / "ca.pem"

    def server_context(self, name: str = HOST, *, days: int = 1) -> ssl.SSLContext:
        """For a server called `name`; expired where `days` is negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(name))] if name[0].isdigit() else [x509.DNSName(name)]
        certificate = _certificate(name, key.public_key(), self.certificate.subject, self.key, names, days)
        file = self.folder / f"{name}{days}.pem"
        file.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


def make_authority(folder: Path) -> Authority:
    """A new one, in `folder`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcdn test authority")])
    certificate = _certificate("kvcdn test authority", key.public_key(), name, key, None, 1)
    authority = Authority(folder, key, certificate)
    authority.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return authority


def _certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None,
    days: int,
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=2))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())


@dataclass
class Front:
    """A running TLS front."""

    port: int
    failures: int = 0
    """Handshakes that failed."""


@contextlib.contextmanager
def tls_front(target_port: int, context: ssl.SSLContext) -> Iterator[Front]:
    """TLS on a free port; what comes out of it goes to `target_port` of this machine."""
    with socket.create_server((HOST, 0)) as listener:
        front = Front(listener.getsockname()[1])
        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=_front, args=(front, client, target_port, context), daemon=True))
                threads[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield front
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join(5)


def _front(front: Front, client: socket.socket, target_port: int, context: ssl.SSLContext) -> None:
    """One connection: a request, its answer, and so on, as HTTP has it; so one thread is enough."""
    client.settimeout(5)
    with client, contextlib.suppress(OSError):
        try:
            secured = context.wrap_socket(client, server_side=True)
        except OSError:
            front.failures += 1
            return
        with secured, socket.create_connection((HOST, target_port), 5) as server:
            answers = threading.Thread(target=_copy, args=(server, secured), daemon=True)
            answers.start()
            _copy(secured, server)
            answers.join(5)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
