"""Who may talk to a run, and how a peer knows that it talks to the right one.

Each run has one bearer token and one self-signed certificate, both made on the head and kept in the run's
`secrets/` folder; agents have credentials of their own (`run/credentials.py`). Guarantees: neither is
replaced once it exists, unless it is damaged; nobody but the owner can read them; a client context trusts
exactly the certificate that it was given, nothing that the machine trusts otherwise and nothing that this
certificate might sign; tokens are compared in constant time.

Only `create_secrets` and `repair_secrets` need the `cryptography` package; they import it when called.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlboost_runtime.errors import DISK_ERRNOS, ProtocolError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

log = logging.getLogger(__name__)

_VALIDITY = datetime.timedelta(days=3650)
_CLOCK_SKEW = datetime.timedelta(days=1)
"""The certificate is valid from this long before now: a machine's clock may be behind the head's."""


def create_secrets(run: RunFolder) -> None:
    """Make the run's token, key and certificate where they do not exist yet.

    May be called again at any time, also after a crash half-way. Raises `RuntimeFault` where the certificate
    exists but its key does not: replacing it would lock out every machine that trusts it.
    """
    folder = run.token.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not run.token.exists():
        _create(run.token, secrets.token_urlsafe(32).encode())
    if not run.api_keys.exists():
        _create(run.api_keys, f"sk-{secrets.token_urlsafe(32)}\n".encode())
    if not run.key.exists():
        if run.certificate.exists():
            raise RuntimeFault(
                f"{run.certificate} exists but its key {run.key.name} does not",
                "restore the key, or delete both files and launch the run's machines again",
            )
        _create(run.key, _new_key())
    if not run.certificate.exists():
        _create(run.certificate, _self_signed(run.key.read_bytes()))


def repair_secrets(run: RunFolder) -> bool:
    """Replace token, key or certificate where they are damaged; return whether they were.

    Machines of the run that live trust the former ones: they cannot dial in any more and end themselves.
    """
    from cryptography import x509

    try:
        server_context(run)  # the key must fit the certificate
        certificate = x509.load_pem_x509_certificate(run.certificate.read_bytes())
        certificate.verify_directly_issued_by(certificate)
        damaged = [] if read_token(run) else [run.token]
    except Exception as problem:  # whatever OpenSSL makes of damaged bytes
        if isinstance(problem, OSError) and problem.errno in DISK_ERRNOS:
            raise
        damaged = [run.key, run.certificate]
    for path in damaged:
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.damaged"))
    if damaged:
        event(log, "secrets.renewed", level=logging.WARNING, damaged=[path.name for path in damaged])
        create_secrets(run)
    return bool(damaged)


def read_token(run: RunFolder) -> str:
    """Return the run's bearer token."""
    return run.token.read_text().strip()


def server_context(run: RunFolder) -> ssl.SSLContext:
    """Return the TLS context (1.2 and later) under which the run's servers listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(run.certificate, run.key)
    return context


def client_context(certificate_pem: str) -> ssl.SSLContext:
    """Return a TLS context that accepts exactly the server holding this certificate.

    Host names are not compared: the pinned certificate is the identity, whatever address leads to it.
    Raises `ProtocolError` where the text is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nothing yet
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate_pem)
    except (ssl.SSLError, ValueError, TypeError) as exc:
        raise _unreadable() from exc
    return context


def authorised(header: str | None, token: str) -> bool:
    """Return True if the value of an `Authorization` header carries the token."""
    if header is None or not token:
        return False
    return hmac.compare_digest(header.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())


def fingerprint(certificate_pem: str) -> str:
    """Return the SHA-256 of the certificate (its DER form) in hex. `ProtocolError` where it is none."""
    try:
        der = ssl.PEM_cert_to_DER_cert(certificate_pem.strip())
    except ValueError as exc:
        raise _unreadable() from exc
    return hashlib.sha256(der).hexdigest()


def _unreadable() -> ProtocolError:
    return ProtocolError(
        "the run's certificate cannot be read", "give the text of secrets/cert.pem of the run"
    )


def _create(path: Path, data: bytes) -> None:
    """Create `path` complete, with mode 600; does nothing where somebody else was faster."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, never replaces
        except FileExistsError:
            return
    finally:
        os.unlink(temporary)


def _new_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _self_signed(key_pem: bytes) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = serialization.load_pem_private_key(key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # `_new_key` makes no other
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rlboost run")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
    )
    for extension, critical in _extensions(key):
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _extensions(key: EllipticCurvePrivateKey) -> list[tuple[x509.ExtensionType, bool]]:
    """Return (extension, critical); `ca=False`, so that nothing this certificate signs is trusted."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return [
        (x509.SubjectAlternativeName(_names()), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage, True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False),
    ]


def _names() -> list[x509.GeneralName]:
    from cryptography import x509

    names: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.DNSName("localhost"),
    ]
    host = socket.gethostname()
    if host.isascii() and host and host != "localhost":
        names.append(x509.DNSName(host))
    return names
