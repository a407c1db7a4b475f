"""An OpenID Connect issuer on this machine: real keys and signatures, a discovery document and a JWKS."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Issuer:
    """Issues tokens and publishes its public keys until the block ends.

    keys: private keys by `kid`, which are all published; tokens are signed with the latest.
    asked: number of requests for the JWKS.
    status: of all answers.
    """

    def __init__(self, audience: str = "headway", algorithm: str = "RS256") -> None:
        self.audience, self.status, self.asked = audience, 200, 0
        self.keys: dict[str, tuple[str, PrivateKey]] = {}
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer._answer(self)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.rotate(algorithm)

    def __enter__(self) -> Issuer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def rotate(self, algorithm: str = "RS256", *, keep: bool = True) -> str:
        """Sign with a new key from now on; keep: go on publishing the others. Return its `kid`."""
        if not keep:
            self.keys.clear()
        kid = f"key-{time.monotonic_ns()}"
        self.keys = {**self.keys, kid: (algorithm, private_key(algorithm))}
        return kid

    def token(self, *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a token of ten minutes for tenant `alpha`; a claim that is None is left out."""
        kid = [*self.keys][-1]
        algorithm, key = self.keys[kid]
        now = time.time()
        standard = {
            "iss": self.url,
            "aud": self.audience,
            "sub": "ann",
            "tenant": "alpha",
            "iat": now,
            "exp": now + 600,
        }
        chosen = {name: value for name, value in (standard | claims).items() if value is not None}
        return jwt.encode(chosen, key, algorithm, {"kid": kid} | (headers or {}))

    def jwks(self) -> dict[str, Any]:
        """Return the public keys."""
        known = get_default_algorithms()
        return {
            "keys": [
                known[algorithm].to_jwk(key.public_key(), as_dict=True) | {"kid": kid, "use": "sig", "alg": algorithm}
                for kid, (algorithm, key) in self.keys.items()
            ]
        }

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        pages: dict[str, Any] = {
            "/.well-known/openid-configuration": {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"},
            "/jwks": self.jwks(),
        }
        self.asked += handler.path == "/jwks"
        found = handler.path in pages
        body = json.dumps(pages.get(handler.path, {})).encode()
        handler.send_response(self.status if found else 404)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


def private_key(algorithm: str) -> PrivateKey:
    """Return a new private key for an algorithm."""
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm.startswith("ES"):
        curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
        return ec.generate_private_key(curves[algorithm])
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)
