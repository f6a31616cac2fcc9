"""Addresses: what is accepted, and what is refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.endpoint import Endpoint, check_host, parse_endpoint, parse_port
from pdrun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node1:29500", Endpoint("node1", 29500)),
        ("10.0.0.1:1", Endpoint("10.0.0.1", 1)),
        ("[::1]:65535", Endpoint("::1", 65535)),
        ("[fe80::1%eth0]:80", Endpoint("fe80::1%eth0", 80)),
        ("pod-0.svc.cluster.local:80", Endpoint("pod-0.svc.cluster.local", 80)),
        ("1node:80", Endpoint("1node", 80)),
    ],
)
def test_endpoints_are_parsed_and_written_back(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text, where="--scheduler") == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://a:80", "URL"),
        ("host:80:80", "colons"),
        ("[::1", "bracket"),
        ("[::1]80", "bracket"),
        ("fe80::1", "colons"),
        ("host", "no port"),
        ("host:", "no port"),
        ("127.1:80", "neither"),
        ("[fe80::1%]:80", "zone"),
        ("[fe80::1%a b]:80", "zone"),
        ("[fe80::1%$(x)]:80", "zone"),
        ("[fe80::1%eth0%eth1]:80", "zone"),
        ("[fe80::1%\x1b]:80", "zone"),
        ("[fe80::1%abcdefghijklmnop]:80", "zone"),
        ("10.0.0.1%eth0:80", "zone"),
        ("0177.0.0.1:80", "neither"),
        ("0x7f.1:80", "neither"),
        (":80", "neither"),
        ("-oProxyCommand=x:80", "neither"),
        ("a b:80", "neither"),
        ("host:0", "not a port"),
        ("host:65536", "not a port"),
        ("host:abc", "not a port"),
        ("host:８０", "not a port"),
        ("host:-1", "not a port"),
    ],
)
def test_bad_endpoints_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_endpoint(text, where="--scheduler")
    assert words in str(caught.value)
    assert str(caught.value).startswith("--scheduler: ")


@pytest.mark.parametrize(
    "name", ["4c01db0b3391", "302x23", "1e5", "0a", "12ab.34cd", "a.1", "1x.2"]
)
def test_hex_digits_are_a_name(name: str) -> None:
    assert check_host(name, where="x") == name


@pytest.mark.parametrize(
    "text",
    ["127.1", "2130706433", "0x7f000001", "0x", "0177.0.0.1", "10.0.0.256", "1.2.3.4.5", "0x7f.1"],
)
def test_numbers_that_a_resolver_may_take_for_an_address_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a host name nor an IP address"):
        check_host(text, where="x")


def test_a_default_port_lets_the_port_be_left_out() -> None:
    assert parse_endpoint("node1", where="x", default_port=29400) == Endpoint("node1", 29400)
    assert parse_endpoint("fe80::1", where="x", default_port=29400) == Endpoint("fe80::1", 29400)
    assert parse_endpoint("[fe80::1]", where="x", default_port=29400) == Endpoint("fe80::1", 29400)
    with pytest.raises(UsageError):
        parse_endpoint("node1:", where="x", default_port=29400)


def test_port_zero_only_where_it_means_choose() -> None:
    assert parse_port("0", where="x", min_port=0) == 0
    with pytest.raises(UsageError):
        parse_port("0", where="x")


@given(st.text(max_size=40))
def test_any_text_gives_a_host_or_a_usage_error(text: str) -> None:
    try:
        host = check_host(text, where="x")
    except UsageError:
        return
    assert host and not host.startswith("-") and "\x00" not in host and " " not in host


@given(st.text(max_size=40))
def test_any_text_gives_an_endpoint_or_a_usage_error(text: str) -> None:
    try:
        found = parse_endpoint(text, where="x")
    except UsageError:
        return
    assert parse_endpoint(str(found), where="x") == found
