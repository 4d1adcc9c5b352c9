"""TLS: what was asked for, checked before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from plait.server.settings import ServerSettings


def uvicorn_settings(settings: ServerSettings) -> dict[str, Any]:
    """The part of uvicorn's configuration that makes it speak TLS; empty without a certificate.

    Raises:
        ValueError: files that are missing or do not fit together.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(settings, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is for TLS, which needs a certificate too: give --ssl-certfile")
        return {}
    required = ssl.VerifyMode(settings.ssl_cert_reqs)
    if required is not ssl.CERT_NONE and settings.ssl_ca_certs is None:
        message = f"--ssl-cert-reqs {required.value} asks clients for certificates: --ssl-ca-certs says whose"
        raise ValueError(message)
    files = {"--ssl-certfile": certificate, "--ssl-keyfile": key, "--ssl-ca-certs": settings.ssl_ca_certs}
    for flag, file in files.items():
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{flag} {file}: there is no such file")
    _try(settings)
    return {
        "ssl_certfile": certificate,
        "ssl_keyfile": key,
        "ssl_ca_certs": settings.ssl_ca_certs,
        "ssl_cert_reqs": required,
    }


def _try(settings: ServerSettings) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert settings.ssl_certfile is not None
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, _no_password)
    except (OSError, ValueError) as error:
        key = settings.ssl_keyfile
        where = f" and --ssl-keyfile {key}" if key else ", which must hold the key too without --ssl-keyfile"
        raise ValueError(f"--ssl-certfile {settings.ssl_certfile}{where}: {_reason(error)}") from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except OSError as error:
            raise ValueError(f"--ssl-ca-certs {settings.ssl_ca_certs}: {_reason(error)}") from None


def _no_password() -> str:
    """Instead of OpenSSL's question in the terminal."""
    raise ValueError("the key is encrypted; plait takes one that is not (openssl pkey -in KEY -out PLAIN)")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"they cannot be used as PEM certificate and key ({error.reason or error})"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
