"""A certificate authority for tests: certificates of this machine and of its clients, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """An authority whose certificate is `ca` in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        made = made.add_extension(usage, critical=True)
        self.ca.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[str, str]:
        """Write a certificate for 127.0.0.1 and its key; return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert, own = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(_named(name), key).add_extension(address, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = made.add_extension(issuer, critical=False)
        cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        own.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        return str(cert), str(own)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now, day = datetime.datetime.now(datetime.UTC).replace(tzinfo=None), datetime.timedelta(days=1)
        made = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number(), now - day)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return made.not_valid_after(now + day).add_extension(identifier, critical=False)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
