"""TLS towards an engine by URL: whom the gateway trusts there, and the certificate that it shows."""

from __future__ import annotations

import ssl

from headway.config import Engine
from headway.errors import ConfigError


def context_of(name: str, engine: Engine) -> ssl.SSLContext | None:
    """Return the context of connections to an engine, None = the system's certificates, and none of the gateway's.

    ConfigError for files that cannot be used. name: of the engine's table.
    """
    if engine.tls_ca is None and engine.tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=engine.tls_ca)
        if engine.tls_cert is not None:
            context.load_cert_chain(engine.tls_cert, engine.tls_key, password="")  # or it would ask for one
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or "the key has a password"
        problem = f"The files of {name}.tls_ca, tls_cert and tls_key cannot be used: {why}."
        fix = "Give PEM files: certificates to trust, and a certificate with its private key, without a password."
        raise ConfigError(problem, fix, param=f"{name}.tls_cert") from error
    return context
