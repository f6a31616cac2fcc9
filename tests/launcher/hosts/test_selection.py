from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.launcher.hosts.selection import (
    Host,
    exclude_hosts,
    include_hosts,
    parse_host_choice,
    parse_hosts,
)


def said(hosts: tuple[Host, ...]) -> list[str]:
    """Return hosts as short texts: name, count, indices."""
    return [
        host.name
        + (f":{host.devices}" if host.devices is not None else "")
        + (f"{list(host.indices)}" if host.indices is not None else "")
        for host in hosts
    ]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b", ["a", "b"]),
        ("a b", ["a", "b"]),
        ("a:4,b:2", ["a:4", "b:2"]),
        ("node[01-03]:8", ["node01:8", "node02:8", "node03:8"]),
        ("n[1-2].site.net", ["n1.site.net", "n2.site.net"]),
        ("[::1]:2,fe80::1,10.0.0.1:3", ["::1:2", "fe80::1", "10.0.0.1:3"]),
        ("n1.a.net,n1.b.net", ["n1.a.net", "n1.b.net"]),
        ("node10,node2", ["node10", "node2"]),
    ],
)
def test_hosts_are_read_in_order(text: str, hosts: list[str]) -> None:
    assert said(parse_hosts(text, "--hosts")) == hosts


def test_a_user_belongs_to_a_host() -> None:
    assert [(host.name, host.user) for host in parse_hosts("alice@a:2,b", "--hosts")] == [
        ("a", "alice"),
        ("b", ""),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        (",", "names no host"),
        ("a,a", "a is listed twice"),
        ("n[1-2],n2", "n2 is listed twice"),
        ("a:0", "'0' is below 1"),
        ("a:abc", "'abc' is not a whole number"),
        ("a:", "'' is not a whole number"),
        ("a:1e9", "is not a whole number"),
        ("a:99999", "is above 4096"),
        ("-oProxyCommand=touch", "is neither a host name"),
        ("-v", "is neither a host name"),
        ("u@-oProxyCommand=x", "is neither a host name"),
        ("-u@h", "is not a valid user name"),
        ("a;reboot", "is neither a host name"),
        ("$(x)", "is neither a host name"),
        ("`x`", "is neither a host name"),
        ("a|b", "is neither a host name"),
        ("a\nb:x", "is not a whole number"),
        ("user@host@x", "is not a valid user name"),
        ("127.1", "is neither a host name"),
        ("h\u0430st", "is neither a host name"),
        ("a" * 64, "is neither a host name"),
        ("a\0b", "is neither a host name"),
        ("n[1-", "the bracket is not closed"),
    ],
)
def test_what_is_no_host_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"^--hosts: ") as caught:
        parse_hosts(text, "--hosts")
    assert words in str(caught.value)


LISTED = parse_hosts("w[0-2]:4,x", "--hosts")


@pytest.mark.parametrize(
    ("choice", "hosts"),
    [
        ("w0", ["w0:4"]),
        ("w1:0,2", ["w1:2[0, 2]"]),
        ("x:1@w0", ["w0:4", "x:1[1]"]),
        ("w[0-1]:3", ["w0:1[3]", "w1:1[3]"]),
    ],
)
def test_include_takes_hosts_and_devices_in_the_order_of_the_list(
    choice: str, hosts: list[str]
) -> None:
    assert said(include_hosts(LISTED, parse_host_choice(choice, "--include"), "--include")) == hosts


@pytest.mark.parametrize(
    ("choice", "hosts"),
    [
        ("w0", ["w1:4", "w2:4", "x"]),
        ("w1:0@x", ["w0:4", "w1:3[1, 2, 3]", "w2:4"]),
        ("w1:0-3", ["w0:4", "w2:4", "x"]),
    ],
)
def test_exclude_leaves_the_rest(choice: str, hosts: list[str]) -> None:
    assert said(exclude_hosts(LISTED, parse_host_choice(choice, "--exclude"), "--exclude")) == hosts


def test_devices_that_nobody_counts_cannot_be_taken_away() -> None:
    with pytest.raises(UsageError, match="the number of devices of x is unknown"):
        exclude_hosts(LISTED, parse_host_choice("x:0", "--exclude"), "--exclude")
    assert (
        said(exclude_hosts(LISTED, parse_host_choice("x:0", "--exclude"), "--exclude", 2))[-1]
        == "x:1[1]"
    )


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("w9", "w9 is not a host of this job"),
        ("w0:7", "w0 has no device 7"),
        ("w0@w0", "w0 is listed twice"),
        ("w0:x", "is neither a host name"),
        ("w0:2-1", "is not a range"),
        ("w0:99999", "is not a device index"),
        ("", "names no host"),
        ("w[0-2]@x", "leaves no host"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(choice: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"^--exclude: ") as caught:
        exclude_hosts(LISTED, parse_host_choice(choice, "--exclude"), "--exclude")
    assert words in str(caught.value)


@given(st.text(alphabet="ab[]-,:@0123456789 .\n$;'\"", max_size=40))
def test_anything_is_read_or_refused(text: str) -> None:
    for read in (parse_hosts, parse_host_choice):
        try:
            found = read(text, "--hosts")
        except UsageError:
            continue
        names = [host.name for host in found] if isinstance(found, tuple) else list(found)
        assert all(
            name and name[0] not in "-." and not set(name) & set(" ;$'\"\n[]@") for name in names
        )
