"""Replica certificates: a CA for the replicas in Slurm, and a certificate for each of their jobs.

    tls/ca.pem, tls/ca-key.pem (0600)      of a root with `replica_tls = "on"`, made on first use
    replicas/<n>/<attempt>/cert.pem, key.pem (0600)     of one job, signed by that CA

A job's supervisor makes its key and certificate when it begins, for its address alone. Both of its
servers show it. The gateway trusts this CA and no other, and compares the address. Who the gateway
is, the secrets say, as without TLS (vllm_plugins/lock.py).

Nothing is renewed while it is used: a certificate outlives every job. An operator's own folder is
used in the same way; with `cert.pem` and `key.pem` in place of `ca-key.pem`, all jobs show these.
"""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from cray_agents.errors import SetupError
from cray_agents.runtime.disk import durable
from cray_agents.runtime.pool.vllm_http import CA, CA_KEY, CERTIFICATE, KEY, TlsFiles

CA_DAYS = 20 * 365.0
DAYS = 5 * 365.0  # of a certificate: longer than any job
_USAGE = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)
_SKEW = datetime.timedelta(days=1)  # by which a node's clock may be behind


def tls_folder(setting: str | Path, own: Path) -> Path | None:
    """Return the folder that `replica_tls` means; make the root's `own` one on first use."""
    if isinstance(setting, Path):
        return setting.resolve()
    if setting == "off":
        return None
    make_authority(own)
    return own.resolve()


def make_authority(folder: Path, days: float = CA_DAYS) -> None:
    """Make a root's own CA, unless there is one."""
    if folder.is_dir():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("cray-agents replicas")
    certificate = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_USAGE, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    draft = durable.draft_directory(folder)
    draft.chmod(0o700)
    durable.write_file(draft / CA_KEY, _private_bytes(key), 0o600)
    durable.write_file(draft / CA, certificate.public_bytes(Encoding.PEM), 0o600)
    if not durable.publish_directory(draft, folder):  # another gateway was first
        durable.remove(draft)


def server_files(folder: Path, address: str, attempt: Path, days: float = DAYS) -> TlsFiles:
    """Return the files that a job's servers on `address` use; sign them by the folder's CA.

    Args:
        folder: the root's own, or the operator's.
        address: an IPv4 address, which the certificate names.
        attempt: the job's folder, which gets certificate and key.

    Raises SetupError.
    """
    if not (folder / CA_KEY).exists():
        return TlsFiles(folder / CA, folder / CERTIFICATE, folder / KEY)
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        signer = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey)
    except (OSError, ValueError, TypeError, AssertionError) as error:
        raise SetupError(f"{folder / CA} and {CA_KEY} cannot sign: {error}") from error
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        _builder(_name(f"replica at {address}"), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(place, critical=False)
        .add_extension(purpose, critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = TlsFiles(folder / CA, attempt / CERTIFICATE, attempt / KEY)
    durable.replace_file(files.key, _private_bytes(key), 0o600)
    durable.replace_file(files.certificate, certificate.public_bytes(Encoding.PEM), 0o600)
    return files


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
