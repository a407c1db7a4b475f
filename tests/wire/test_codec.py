"""Everything that events and commands say survives the way through bytes; anything else is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.cluster.wire import codec
from headway.cluster.wire.codec import Envelope, WireError, decode, encode
from headway.events import Arrived, Finished, InstanceUp, Learned, Started
from headway.policy.forecast.latency.profiles import load, names
from headway.prefix import Prefix
from headway.stages import Prewarm, Resource
from headway.types import Batch, Instance, Request, Send
from tests.wire import words

# Of the fields of everything that may be in an envelope, by `VERSION`.
FINGERPRINTS = {
    1: "3327dee9b671da53",
    2: "3cb863c81a41f36e",
    3: "ed152ba2eb04b848",
    4: "cd85f204e05b8823",
    5: "8c165843df3b9275",
    6: "c4f521e011d45a1a",
    7: "a7cc77e25542dc35",
    8: "0524a2f1d1ed5201",
    9: "1dbfa6d4409d9665",
    10: "d6e71d1c11a591d8",
    11: "33466d2f03eee4db",
}


@pytest.mark.parametrize("kind", words.KINDS, ids=lambda kind: kind.__name__)
def test_every_field_survives(kind: type[Any]) -> None:
    @given(item=words.of(kind), epoch=st.integers(0, 2**62), number=st.integers(0, 2**62))
    def check(item: Any, epoch: int, number: int) -> None:
        envelope = Envelope(epoch, "gateway-1", number, 1.5, (item,))
        again = decode(encode(envelope))
        assert words.plain(again) == words.plain(envelope)

    check()


@given(items=words.ITEMS)
def test_items_keep_their_order(items: list[Any]) -> None:
    again = decode(encode(Envelope(3, "controller", 7, 1.5, tuple(items))))
    assert words.plain(list(again.items)) == words.plain(items)


def test_a_latency_forecast_forecasts_the_same() -> None:
    """`==` of instances leaves it out."""
    there = load(names()[0]).latency().seconds
    instance = Instance("e0", "m", 8, 100, 16, 4096, latency=there)
    (event,) = decode(encode(Envelope(0, "agent", 1, 1.5, (InstanceUp(instance),)))).items
    assert isinstance(event, InstanceUp)
    assert event.instance.latency is not None
    assert event.instance.latency(Batch(3, 700, 512, 1 << 17)) == there(Batch(3, 700, 512, 1 << 17))


def test_any_other_function_is_refused() -> None:
    instance = Instance("e0", "m", 8, 100, 16, 4096, latency=lambda batch: 1.0)
    with pytest.raises(WireError, match="InstanceUp cannot be sent: function is a type that the wire does"):
        encode(Envelope(0, "agent", 1, 1.5, (InstanceUp(instance),)))


def test_numbers_of_numpy_travel_as_python_s() -> None:
    send: Any = Send("a", "e0", np.float64(0.1))
    finished: Any = Finished("a", np.int64(7))
    again = decode(encode(Envelope(0, "c", 1, 1.5, (send, finished)))).items
    assert words.plain(again) == words.plain((Send("a", "e0", 0.1), Finished("a", 7)))


def test_infinities_and_not_a_number_survive() -> None:
    until = Prewarm("t", Resource("backend", "b"), math.inf)
    theta = Learned("e0", np.array([math.nan, -math.inf]))
    again = decode(encode(Envelope(0, "c", 1, 1.5, (until, theta)))).items
    assert again[0] == until
    assert np.array_equal(again[1].theta, theta.theta, equal_nan=True)  # type: ignore[union-attr]


def test_a_lone_surrogate_cannot_be_sent() -> None:
    with pytest.raises(WireError, match="Started cannot be sent"):
        encode(Envelope(0, "g", 1, 1.5, (Started("\ud800"),)))


def test_a_prefix_without_end_cannot_be_sent() -> None:
    prefix = Prefix("0", 1)
    for _ in range(20_000):
        prefix = Prefix("0", 1, parent=prefix)
    with pytest.raises(WireError, match="Arrived cannot be sent"):
        encode(Envelope(0, "g", 1, 1.5, (Arrived(Request("a", "m", 1, 1, 0.0, prefix=prefix)),)))


# ---- bytes that `encode` has not written


WHOLE = encode(Envelope(2, "g", 1, 1.5, (Started("a"),)))


@given(data=st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 100_000)  # arrays in arrays
def test_any_bytes_are_an_envelope_or_a_clear_error(data: bytes) -> None:
    with pytest.raises(WireError, match="A message"):
        decode(data)


@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
def test_one_wrong_byte_is_another_envelope_or_a_clear_error(at: int, byte: int) -> None:
    data = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
    try:
        again = decode(data)
    except WireError:
        return
    assert decode(encode(again)) == again


def altered(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(WHOLE) | fields)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (altered(version=1), f"is of version 1 of the control wire; this Headway speaks {codec.VERSION}. Run the same"),
        (altered(version=None), "Expected `int`, got `None` - at `$.version`"),
        (altered(more=1), "unknown field `more`"),
        (altered(items=[{"kind": "Exploded", "body": {}}]), "holds the unknown kind 'Exploded'. Run"),
        (altered(items=[{"kind": "Started", "body": {}}]), "missing required field `id`"),
        (altered(items=[{"kind": "Started", "body": {"id": 1}}]), "Expected `str`, got `int`"),
        (altered(items=[{"kind": "Started"}]), "missing required field `body`"),
        (altered(items=[{"kind": "Learned", "body": {"instance": "e", "theta": ["x"]}}]), "Expected `float`"),
        (WHOLE[:-1], "A message cannot be read: Input data was truncated"),
        (WHOLE + b"\x00", "A message cannot be read: MessagePack data is malformed: trailing"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=re.escape(words)):
        decode(data)


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ({"name": "magic", "coefficients": []}, "'magic' with 0 coefficients is not a latency law"),
        ({"name": "bros", "coefficients": [1.0]}, "'bros' with 1 coefficients is not a latency law"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_law_that_is_none_is_refused(law: Any, words: str) -> None:
    instance = dataclasses.asdict(Instance("e0", "m", 8, 100, 16, 4096)) | {"latency": law}
    with pytest.raises(WireError, match=re.escape(words)):
        decode(altered(items=[{"kind": "InstanceUp", "body": {"instance": instance}}]))


def test_a_change_of_what_travels_is_a_new_version() -> None:
    """A process of another release must not read a field as missing or leave one out."""
    now = hashlib.sha256(repr(words.schema()).encode()).hexdigest()[:16]
    assert FINGERPRINTS.get(codec.VERSION) == now, "raise codec.VERSION and record its fingerprint here"
