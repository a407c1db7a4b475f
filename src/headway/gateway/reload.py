"""SIGHUP: read the configuration file again, and take over its classes and keys without a restart."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

from headway.config import Config, load
from headway.config.keys import revealed
from headway.errors import ConfigError, HeadwayError
from headway.gateway.apis.state import AppState

_RELOADED = ("classes", "keys")
log = logging.getLogger("headway.gateway")


class Reload:
    """Takes over what a file says of classes and keys; requests that are open keep what they were promised.

    A file that cannot be read, or would not start, changes nothing.
    """

    def __init__(self, path: Path, state: AppState) -> None:
        self._path, self._state = path, state
        self._known = load(path, checked=False)  # without the command line's options, which may resolve contradictions

    def __call__(self) -> None:
        """Read the file again; what is wrong with it is logged."""
        try:
            new = load(self._path)
            revealed(new.keys)
            self._check(new)
        except HeadwayError as error:
            log.error("%s is not reloaded: %s %s", self._path, error.message, error.hint)
            return
        self._state.adopt(new.classes, new.keys)
        for line in self._state.gateway.paces.warnings(new.classes):
            log.warning("%s", line)
        others = [
            entry.name
            for entry in fields(Config)
            if entry.name not in _RELOADED and getattr(new, entry.name) != getattr(self._known, entry.name)
        ]
        log.info("%s: %d classes and %d keys reloaded", self._path, len(new.classes), len(new.keys))
        if others:
            log.warning("%s: %s take effect after a restart only", self._path, ", ".join(others))

    def _check(self, new: Config) -> None:
        """Refuse what the gateway was not set up for: it keeps account of tenants from its start on."""
        now = self._state.config
        if new.several_tenants != now.several_tenants or bool(new.keys) != bool(now.keys):
            raise ConfigError(
                "It adds or removes the first key or the second tenant.",
                "Restart the gateway for this change.",
                param="keys",
            )
        drops = [any(tier.drop for tier in config.classes.values()) for config in (now, new)]
        if drops == [False, True]:
            raise ConfigError(
                "A class drops requests, and none did before.", "Restart the gateway for this change.", param="classes"
            )
