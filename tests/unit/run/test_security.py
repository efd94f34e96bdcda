from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "one")
    security.create_secrets(run)
    return run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Do a TLS handshake in memory; raises what the client raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="head.example")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ours.version() in ("TLSv1.2", "TLSv1.3")


def test_secrets_belong_to_the_owner_alone(run: RunFolder) -> None:
    assert mode(run.token.parent) == 0o700
    assert {mode(p) for p in (run.token, run.key, run.certificate)} == {0o600}
    assert len(security.read_token(run)) >= 43
    assert sorted(os.listdir(run.token.parent)) == ["api_keys", "cert.pem", "key.pem", "token"]


def test_secrets_are_never_replaced(run: RunFolder) -> None:
    before = [p.read_bytes() for p in (run.token, run.key, run.certificate)]
    security.create_secrets(run)
    assert [p.read_bytes() for p in (run.token, run.key, run.certificate)] == before


def test_a_half_made_folder_is_completed_from_its_key(run: RunFolder) -> None:
    run.certificate.unlink()
    key = run.key.read_bytes()
    security.create_secrets(run)
    assert run.key.read_bytes() == key
    handshake(security.server_context(run), security.client_context(run.certificate.read_text()))


def test_a_certificate_without_its_key_is_an_error(run: RunFolder) -> None:
    run.key.unlink()
    with pytest.raises(RuntimeFault, match=r"key\.pem"):
        security.create_secrets(run)


def test_certificate_names_this_host_and_lasts_ten_years(run: RunFolder) -> None:
    certificate = x509.load_pem_x509_certificate(run.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left > datetime.timedelta(days=3640)
    begun = datetime.datetime.now(datetime.UTC) - certificate.not_valid_before_utc
    assert begun > datetime.timedelta(hours=20), "a machine whose clock is hours behind accepts it"


def test_the_pinned_server_is_accepted_under_any_name(run: RunFolder) -> None:
    handshake(security.server_context(run), security.client_context(run.certificate.read_text()))


def test_another_self_signed_certificate_is_refused(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    security.create_secrets(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(security.server_context(other), security.client_context(run.certificate.read_text()))


def test_a_certificate_signed_by_the_pinned_one_is_refused(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    security.create_secrets(other)
    ours = x509.load_pem_x509_certificate(run.certificate.read_bytes())
    key = serialization.load_pem_private_key(run.key.read_bytes(), None)
    their_key = serialization.load_pem_private_key(other.key.read_bytes(), None)
    signed = (
        x509.CertificateBuilder()
        .issuer_name(ours.subject)
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "intruder")]))
        .public_key(their_key.public_key())
        .serial_number(7)
        .not_valid_before(ours.not_valid_before_utc)
        .not_valid_after(ours.not_valid_after_utc)
        .sign(key, hashes.SHA256())
    )
    other.certificate.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM) + run.certificate.read_bytes()
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(security.server_context(other), security.client_context(run.certificate.read_text()))


def test_an_old_tls_client_is_refused(run: RunFolder) -> None:
    client = security.client_context(run.certificate.read_text())
    assert client.minimum_version == ssl.TLSVersion.TLSv1_2
    assert security.server_context(run).minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAA==\n"])
def test_text_that_is_no_certificate_is_explained(text: str) -> None:
    with pytest.raises(ProtocolError):
        security.client_context(text)
    with pytest.raises(ProtocolError):
        security.fingerprint(text)


def test_fingerprint_is_the_certificates_sha256(run: RunFolder) -> None:
    text = run.certificate.read_text()
    expected = x509.load_pem_x509_certificate(text.encode()).fingerprint(hashes.SHA256()).hex()
    assert security.fingerprint(text) == security.fingerprint(f"\n{text}\n") == expected


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("Bearer secret", True),
        ("Bearer secret ", False),
        ("bearer secret", False),
        ("Bearer Secret", False),
        ("secret", False),
        ("Bearer ", False),
        ("", False),
        ("Bearer \udcffsecret", False),
        (None, False),
    ],
)
def test_only_the_exact_token_is_authorised(header: str | None, allowed: bool) -> None:
    assert security.authorised(header, "secret") is allowed


def test_an_empty_token_authorises_nobody() -> None:
    assert not security.authorised("Bearer ", "")
