"""TLS files: the PEM files of a replica's servers and of the gateway, and the contexts they make.

replica_certificates.py makes them. Without TLS nothing here is used.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import SetupError

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"


@dataclass(frozen=True)
class TlsFiles:
    """The files of one replica's servers: whom they trust, what they show, and its key."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        """vLLM's flags."""
        return ("--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key))

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server. Raises SetupError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise SetupError(f"{self.certificate} and {self.key} cannot be used: {error}") from None
        return context


def client_context(ca: Path) -> ssl.SSLContext:
    """Return the context of a client that trusts one CA and no other. Raises SetupError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise SetupError(
            f"{ca} cannot be used ({error}): replica_tls names a folder with {CA}, and either "
            f"{CA_KEY} or {CERTIFICATE} and {KEY}"
        ) from error
