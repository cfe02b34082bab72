"""Certificates of servers on this machine."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return a server's context for 127.0.0.1, and the file of its certificate, which nobody trusts."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    try:
        subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate
