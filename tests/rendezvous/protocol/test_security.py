"""
Secrets, tokens, the cookie: they never show, copy errors are caught, and no weak file is believed.
"""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.security import (
    KeyPair,
    Secret,
    cookie_path,
    derive_key,
    derive_key_pair,
    find_secret,
    format_token,
    is_secret_named,
    load_cookie,
    parse_token,
    read_token_file,
)

SECRET = Secret(bytes(range(32)))
TOKEN = format_token(SECRET)


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_token(text, where="PDRUN_TOKEN")
    shown = str(caught.value)
    assert shown.startswith("PDRUN_TOKEN: ") and TOKEN.split("-")[1][:8] not in shown
    return shown


def test_a_secret_never_shows() -> None:
    formatted = "%s" % SECRET  # noqa: UP031
    for shown in (repr(SECRET), str(SECRET), f"{SECRET}", formatted, repr([SECRET])):
        assert "Secret(...)" in shown and SECRET.reveal().hex() not in shown
    for escape in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            escape(SECRET)
    assert not hasattr(SECRET, "__dict__")
    assert Secret.from_hex(SECRET.reveal().hex()) == SECRET != Secret.random()
    assert "private" not in repr(KeyPair(b"public", b"private"))


def test_hkdf_is_rfc_5869() -> None:
    # Test case 1 of RFC 5869, first block.
    found = derive_key(
        b"\x0b" * 22,
        bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
        salt=bytes.fromhex("000102030405060708090a0b0c"),
    )
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_every_role_has_keys_of_its_own() -> None:
    pairs = [derive_key_pair(SECRET, who) for who in ("server", "agent", "view")]
    assert len({pair.public for pair in pairs} | {pair.private for pair in pairs}) == 6
    assert derive_key_pair(SECRET, "agent") == pairs[1]
    assert derive_key_pair(Secret.random(), "agent") != pairs[1]


@given(st.binary(min_size=32, max_size=32))
def test_a_token_comes_back(value: bytes) -> None:
    text = format_token(Secret(value))
    assert parse_token(f"  {text}\n", where="x") == Secret(value)
    assert parse_token(text.lower(), where="x") == Secret(value)


def test_the_token_is_frozen() -> None:
    assert (
        "pdrun1-AAAQEAYEAUDAOCAJBIFQYDIOB4IBCEQTCQKRMFYYDENBWHA5DYPQ-" + TOKEN.split("-", 2)[2]
        == TOKEN
    )
    assert len(TOKEN) == 85


@pytest.mark.parametrize("text", ["", " ", "x", "pdrun", "SWMTKN-1-abc", "pdrun1"])
def test_no_token(text: str) -> None:
    assert "token" in complaint(text)


def test_copy_errors_are_told_apart() -> None:
    assert "another version ('pdrun2')" in complaint(TOKEN.replace("pdrun1", "pdrun2"))
    for length in range(7, len(TOKEN)):
        assert "cut off" in complaint(TOKEN[:length])
    for place in range(7, len(TOKEN)):
        if TOKEN[place] != "-":
            wrong = (
                TOKEN[:place] + ("A" if TOKEN[place].upper() != "A" else "B") + TOKEN[place + 1 :]
            )
            assert "mistyped" in complaint(wrong)
    complaint(TOKEN + "0")
    complaint(TOKEN + "-0")


def test_a_token_of_mixed_halves_is_refused() -> None:
    import zlib

    other = format_token(Secret.random()).split("-")
    body = f"pdrun1-{other[1]}-{TOKEN.split('-')[2]}"
    assert "scheduler key does not belong" in complaint(f"{body}-{zlib.crc32(body.encode()):08x}")


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_sources_in_order(private: Path, tmp_path: Path) -> None:
    environ = {
        "PDRUN_TOKEN": format_token(Secret(b"e" * 32)),
        "PDRUN_TOKEN_FILE": str(private),
        "HOME": str(tmp_path),
    }
    assert find_secret(str(private), environ=environ) == (SECRET, f"--token-file {private}")
    assert find_secret(environ=environ) == (SECRET, f"PDRUN_TOKEN_FILE={private}")
    del environ["PDRUN_TOKEN_FILE"]
    assert find_secret(environ=environ) == (Secret(b"e" * 32), "PDRUN_TOKEN")
    del environ["PDRUN_TOKEN"]
    found, source = find_secret(environ=environ)
    assert (
        source == f"cookie {tmp_path}/.config/pdrun/cookie"
        and find_secret(environ=environ)[0] == found
    )


def test_the_token_holds_for_the_process_and_for_none_of_its_children(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDRUN_TOKEN_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not is_secret_named() and is_secret_named(str(private))
    monkeypatch.setenv("PDRUN_TOKEN", format_token(SECRET))
    assert is_secret_named() and "PDRUN_TOKEN" not in os.environ
    assert [find_secret(), find_secret()] == [(SECRET, "PDRUN_TOKEN")] * 2
    assert is_secret_named() and not (tmp_path / ".config").exists()


def test_a_bad_source_is_not_passed_over(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PDRUN_TOKEN": ""}
    with pytest.raises(ConfigError, match="PDRUN_TOKEN"):
        find_secret(environ=environ)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_secret(str(tmp_path / "none"), environ=environ)
    assert not (tmp_path / ".config").exists()


def test_the_cookie_is_made_private(tmp_path: Path) -> None:
    path = cookie_path({"XDG_CONFIG_HOME": str(tmp_path / "deep" / "er")})
    old = os.umask(0)
    try:
        secret = load_cookie(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in list(path.parents)[:3]] == [0o700] * 3
    assert path.read_bytes() == secret.reveal() and load_cookie(path) == secret
    assert os.listdir(path.parent) == ["cookie"]


def test_a_cookie_that_another_process_has_just_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_cookie(tmp_path / "cookie")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # as it was a moment ago
    assert load_cookie(tmp_path / "cookie") == first
    assert [path.name for path in tmp_path.iterdir()] == ["cookie"]


def test_processes_that_race_get_one_cookie(tmp_path: Path) -> None:
    code = (
        "import sys, hashlib; from pathlib import Path; from pdrun.rendezvous.protocol.security import load_cookie\n"
        "sys.stdin.read(1); print(hashlib.sha256(load_cookie(Path(sys.argv[1])).reveal()).hexdigest())"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "new" / "cookie")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"g")
        racer.stdin.flush()
    seen = {racer.communicate(timeout=30)[0] for racer in racers}
    assert len(seen) == 1 and len(seen.pop()) == 65
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cookie"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_use_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"other users can access it .mode {mode:04o}.; chmod 600"
    ):
        read_token_file(str(private), where="--token-file")


@pytest.mark.parametrize(
    "kind", ["link", "dangling", "folder", "fifo", "device", "missing", "binary"]
)
def test_what_is_no_private_file_is_refused(private: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(private)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "binary":
        path.write_bytes(b"\xff" * 99)
        path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_token_file(str(path), where="--token-file")
    assert str(path) in str(caught.value) and caught.value.exit_code == 78


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 31, b"x" * 33, b"x" * 5000])
def test_a_cookie_of_wrong_size_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cookie"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"rm {path}"):
        load_cookie(path)
    assert path.read_bytes() == content


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(private: Path) -> None:
    os.chown(private, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_token_file(str(private), where="--token-file")
    private.write_bytes(b"x" * 32)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        load_cookie(private)


def test_without_a_home_there_is_no_cookie() -> None:
    with pytest.raises(ConfigError, match="HOME is not set"):
        cookie_path({})
    with pytest.raises(ConfigError, match="HOME is not set"):
        cookie_path({"XDG_CONFIG_HOME": "relative", "HOME": "also/relative"})


def test_a_home_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        load_cookie(tmp_path / "file" / "pdrun" / "cookie")


def test_a_disk_that_fills_up_leaves_no_draft_of_a_cookie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "pdrun" / "cookie"
    with pytest.raises(ConfigError, match="No space left"):
        load_cookie(path)
    assert list(path.parent.iterdir()) == []
