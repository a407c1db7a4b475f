"""Encodes messages as bytes (msgpack), in envelopes that name their sender and the leader's term.

An envelope is {"version", "epoch", "sender", "number", "sent", "items"}, an item {"kind": "Send", "body"}.
Floats travel as their eight bytes, infinities included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from headway.cluster.wire.messages import Item
from headway.errors import HeadwayError
from headway.policy.forecast.latency.laws import LAWS, LatencyLaw
from headway.policy.forecast.latency.profiles import FixedLatency

VERSION = 11  # of an envelope's contents; `tests/wire/test_codec.py` fails when they change and this does not
KINDS: dict[str, type[Item]] = {kind.__name__: kind for kind in get_args(Item)}


class WireError(HeadwayError):
    """A message cannot be sent, or cannot be read."""

    status = 503
    kind = "server_error"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The contents of one message.

    epoch: term of the leader that sent it, 0 = the sender does not lead.
    sender: name of a gateway, an agent or a controller.
    number: grows by one with each message from a sender to the same receiver.
    sent: instant of sending, by the sender's clock.
    """

    epoch: int
    sender: str
    number: int
    sent: float
    items: tuple[Item, ...]


class _Head(msgspec.Struct):
    version: int


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    body: msgspec.Raw


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    epoch: int
    sender: str
    number: int
    sent: float
    items: list[_Item]


class _Law(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    coefficients: list[float]


def encode(envelope: Envelope) -> bytes:
    """Return an envelope as bytes. WireError when a field of an item cannot travel."""
    items = [{"kind": type(item).__name__, "body": item} for item in envelope.items]
    try:
        return _ENCODER.encode(
            {
                "version": VERSION,
                "epoch": envelope.epoch,
                "sender": envelope.sender,
                "number": envelope.number,
                "sent": envelope.sent,
                "items": items,
            }
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        kinds = ", ".join(sorted({type(item).__name__ for item in envelope.items}))
        raise WireError(
            f"{kinds or 'A message'} cannot be sent: {error}.", "Use the field types that docs/map.md lists."
        ) from error


def decode(data: bytes) -> Envelope:
    """Return the envelope that `encode` was given. WireError, with the reason, for any other bytes."""
    try:
        version = _HEAD.decode(data).version
        if version != VERSION:
            raise WireError(
                f"A message is of version {version} of the control wire; this Headway speaks {VERSION}.",
                "Run the same release of Headway everywhere.",
            )
        message = _MESSAGE.decode(data)
        items = tuple(_body(item) for item in message.items)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"A message cannot be read: {error}.", "Let only Headway write to its queues.") from error
    return Envelope(message.epoch, message.sender, message.number, message.sent, items)


def _body(item: _Item) -> Item:
    decoder = _DECODERS.get(item.kind)
    if decoder is None:
        raise WireError(
            f"A message holds the unknown kind {item.kind!r}.", "Run the same release of Headway everywhere."
        )
    return decoder.decode(item.body)


def _to_plain(value: Any) -> Any:
    """Convert values that msgpack does not know: numpy numbers, arrays and latency forecasts."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(getattr(value, "__self__", None), FixedLatency):
        return _Law(value.__self__.law.NAME, value.__self__.law.array().tolist())
    raise TypeError(f"{type(value).__name__} is a type that the wire does not know")


def _from_plain(wanted: Any, value: Any) -> Any:
    """Undo `_to_plain` for a field of type `wanted`."""
    if get_origin(wanted) is np.ndarray:
        return np.array(msgspec.convert(value, list[float]), np.float64)
    if get_origin(wanted) is Callable:
        return FixedLatency(_law(msgspec.convert(value, _Law))).seconds
    raise TypeError(f"{wanted} is a type that the wire does not know")


def _law(law: _Law) -> LatencyLaw:
    kind = LAWS.get(law.name)
    if kind is None or len(law.coefficients) != len(fields(kind)):
        raise ValueError(f"{law.name!r} with {len(law.coefficients)} coefficients is not a latency law")
    return kind(*law.coefficients)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_HEAD = msgspec.msgpack.Decoder(_Head)
_MESSAGE = msgspec.msgpack.Decoder(_Message)
_DECODERS = {name: msgspec.msgpack.Decoder(kind, dec_hook=_from_plain) for name, kind in KINDS.items()}
