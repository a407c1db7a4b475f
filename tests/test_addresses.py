"""What is an address, and how one is written."""

from __future__ import annotations

import pytest

from headway.addresses import is_host, is_url, netloc
from headway.cluster.up.cluster import _knock

NO_PLACE = ["h:99999", "", "a b", "h:x", ":80", "[::1", "::1:80", "h:0", "h:80 ", "h\n", "[10.0.0.5]"]


def test_an_ipv6_address_is_in_brackets() -> None:
    assert netloc("10.0.0.5", 80) == "10.0.0.5:80"
    assert netloc("::1", 80) == "[::1]:80"


@pytest.mark.parametrize("place", ["h", "h:65535", "[::1]:80", "[::1]", "10.0.0.5:1", "a_b.c:8000/v1", "u:p@h:1"])
def test_what_is_a_url(place: str) -> None:
    assert is_url(f"http://{place}", "http", "https")
    assert not is_url(f"ftp://{place}", "http", "https")


@pytest.mark.parametrize("place", NO_PLACE)
def test_what_is_none(place: str) -> None:
    assert not is_url(f"http://{place}", "http")


@pytest.mark.parametrize("host", ["h", "10.0.0.5", "::", "::1", "fe80::1%eth0", "agent-0.agents"])
def test_what_is_a_host(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize("host", ["", "a b", "10.0.0.5:9000", "http://h", "[::1]", "h/x", "u@h", "h\n"])
def test_what_is_more_than_a_host(host: str) -> None:
    assert not is_host(host)


@pytest.mark.parametrize("address", ["h:99999", "ray://h:99999", "[::1]:99999"])
def test_a_port_that_a_ray_cluster_cannot_have(address: str) -> None:
    with pytest.raises(ValueError, match="Port"):
        _knock(address)
