"""What the workers of model backends load in these tests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from headway.cluster.backends.port import HeldWorker, UnitResult
from headway.config import Backend as Settings


def scripted(greeting: str = "hello") -> Callable[[Any], Any]:
    """Return what does as its input says."""

    def call(input: Any) -> Any:
        print("a library prints", input)
        match input:
            case "pid":
                return os.getpid()
            case "sleep":
                time.sleep(60)
            case "die":
                os._exit(3)
            case "value":
                raise ValueError("not like this")
            case "bug":
                raise RuntimeError("a bug")
            case "set":
                return {1, 2}
            case "long":
                return "x" * 5000
        return greeting

    return call


def stuck() -> None:
    """Never come back."""
    time.sleep(60)


def broken() -> None:
    """Fail, and say why."""
    sys.exit("there are no weights")


def digits() -> Callable[[list[list[float]]], Any]:
    """Return a classifier of 8 x 8 images of digits, fitted by scikit-learn: rows of pixels -> digits."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    images = load_digits()
    model = LogisticRegression(max_iter=300).fit(images.data[:500] / 16, images.target[:500])

    def call(pixels: list[list[float]]) -> Any:
        return model.predict(pixels)

    return call


class Echo:
    """A backend of one's own: returns tenant and input, and is always warm."""

    shared = True

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.word = name, settings.options["word"]
        self.closed = False

    async def warm(self) -> HeldWorker | None:
        return None

    async def run(self, tenant: str, input: Any) -> UnitResult:
        return UnitResult([self.word, tenant, input], warm=True, waited=0.0)

    async def close(self) -> None:
        self.closed = True
