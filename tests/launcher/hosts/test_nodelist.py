from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.launcher.hosts.nodelist import MAX_HOSTS, compress_names, expand_nodelist

SAME_AS_SLURM = (
    "node[01-03,07]",
    "a[1-2],b[3-4]",
    "rack[0-1]node[2-3]",
    "n[1-2][3-4]",
    "n[9-11]",
    "n[09-11]",
    "n[008-010,1]",
    "n[01-3]",
    "n[1-03]",
    "n[99999-100001]",
    "node1,node1",
    "node[1,1,2]",
    "node[3,1,2]",
    "n1 n2",
    "n1, n2",
    "n1,,n2",
    ",n1",
    "10.0.0.[1-3]",
    "alpha,beta,gamma",
    "fe80::1,n2",
    "n[0-1]x[00-01]",
    "a[1-2],b,c[3-4]",
)
HAND = {
    "gpu-[01-03]-ib": ("gpu-01-ib", "gpu-02-ib", "gpu-03-ib"),
    "c1-[1-2].cluster.local": ("c1-1.cluster.local", "c1-2.cluster.local"),
    "x[0-1]y": ("x0y", "x1y"),
    "a[1-3]x[7]b": ("a1x7b", "a2x7b", "a3x7b"),
    "n[01-3]": ("n01", "n02", "n03"),
    "": (),
}
"""What Slurm itself refuses, and other tools take."""


def by_scontrol(text: str, folder: Path) -> list[str]:
    """Return what Slurm's own parser makes of a list."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed (Debian: slurm-client)")
    conf = folder / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(conf)}
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, check=False, timeout=60
    )
    return done.stdout.split()


@pytest.mark.parametrize("text", SAME_AS_SLURM)
def test_a_list_is_read_as_slurm_reads_it(text: str, tmp_path: Path) -> None:
    assert list(expand_nodelist(text, "x")) == by_scontrol(text, tmp_path)


def test_lists_made_at_random_are_read_as_slurm_reads_them(tmp_path: Path) -> None:
    random_ = random.Random(5)
    parts = []
    for _ in range(120):
        low = random_.randrange(120)
        width = random_.choice((1, 1, 2, 3, 4))
        inner = f"{low:0{width}d}-{low + random_.randrange(12)}"
        if random_.random() < 0.4:
            inner += f",{random_.randrange(50)}"
        tail = (
            f"x[{random_.randrange(3)}-{3 + random_.randrange(3)}]"
            if random_.random() < 0.3
            else ""
        )
        parts.append(f"n{random_.randrange(9)}a[{inner}]{tail}")
    text = ",".join(parts)
    assert list(expand_nodelist(text, "x")) == by_scontrol(text, tmp_path)


@pytest.mark.parametrize(("text", "names"), HAND.items())
def test_what_slurm_refuses_and_other_tools_take(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodelist(text, "x") == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n[2-1]", "the range 2-1 runs backwards (character 3)"),
        ("n[]", "expected a number or LOW-HIGH, got nothing"),
        ("n[1,]", "expected a number or LOW-HIGH, got nothing (character 5)"),
        ("n[a-c]", "expected a number or LOW-HIGH, got 'a-c'"),
        ("n[1-10:2]", "got '1-10:2'"),
        ("n[1-2", "the bracket is not closed (character 2)"),
        ("n[1-", "the bracket is not closed"),
        ("n[ 1-2]", "got ' 1-2'"),
        ("n]", "a closing bracket without"),
        ("n[1-[2]]", "a bracket inside brackets (character 5)"),
        ("n[1-99999999]", f"more than {MAX_HOSTS} hosts"),
        ("n[1-1000][1-1000]", f"more than {MAX_HOSTS} hosts"),
        ("n[1-40000],m[1-40000]", f"more than {MAX_HOSTS} hosts"),
        ("n[１-２]", "expected a number or LOW-HIGH"),
        ("n" * (1 << 20) + "n", "is too long"),
    ],
)
def test_a_malformed_list_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand_nodelist(text, "SLURM_JOB_NODELIST")
    assert words in str(caught.value)
    assert str(caught.value).startswith("SLURM_JOB_NODELIST: ")
    assert len(str(caught.value)) < 300


def test_hostile_lists_take_little_time_and_memory() -> None:
    texts = [
        "n[1-999999999999999999]",
        "[" * 100_000,
        "n[0-9]" * 10_000,
        "a," * 100_000,
        "n[" + "1," * 80_000 + "1]",
    ]
    tracemalloc.start()
    begin = time.process_time()
    for text in texts:
        try:
            assert len(expand_nodelist(text, "x")) <= 65_536
        except UsageError:
            continue
    taken, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 30  # seconds of CPU, while memory is traced
    assert peak < 400 << 20


NAMES = st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-[a-z0-9]{1,2})?", fullmatch=True)


@given(st.lists(NAMES, max_size=30))
def test_compressing_keeps_order_and_repetitions(names: list[str]) -> None:
    assert expand_nodelist(compress_names(names), "x") == tuple(names)


def test_a_compressed_list_is_short() -> None:
    assert compress_names(["node3", "node1", "node2", "node1"]) == "node[3,1-2,1]"
    assert compress_names([f"n{number:04d}" for number in range(8, 2000)]) == "n[0008-1999]"
    assert compress_names(["n9", "n10", "n011"]) == "n[9-10,011]"


@given(st.text(alphabet="n[]-,0123456789 x.:", max_size=40))
def test_anything_is_read_or_refused(text: str) -> None:
    try:
        names = expand_nodelist(text, "x", max_names=1000)
    except UsageError:
        return
    assert len(names) <= 1000
    assert all(name and not set(name) & set("[], ") for name in names)
