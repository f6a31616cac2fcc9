"""Token files in a Secret volume of Kubernetes: which are read, and which are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.security import Secret, format_token, read_token_file

IN_VOLUME = r"""
import json, os, subprocess, sys
from pdrun.errors import ConfigError
from pdrun.rendezvous.protocol.security import Secret, format_token, read_token_file

def volume(name, mode, owner=(0, 0), kind="tmpfs", options="ro", folder=0o755):
    "Lay out a Secret volume as the kubelet does: a link to a link to a file."
    os.makedirs(name)
    if kind:
        subprocess.run(["mount", "-t", kind, kind, name], check=True)
    inner = f"{name}/..2026_11_29"
    os.mkdir(inner)
    os.symlink("..2026_11_29", f"{name}/..data")
    os.symlink("..data/token", f"{name}/token")
    with open(f"{inner}/token", "w") as file:
        file.write(format_token(Secret(b"k" * 32)))
    os.chmod(f"{inner}/token", mode)
    os.chown(f"{inner}/token", *owner)
    for path in (inner, name):
        os.chmod(path, folder)
    if kind and options == "ro":
        subprocess.run(["mount", "-o", "remount,ro", name], check=True)

volume("ro-0444", 0o444)
volume("ro-0440", 0o440, (0, 3000))
volume("ro-0644", 0o644)
volume("tmpfs-0440", 0o440, (0, 3000), options="rw")
volume("group-write", 0o460, (0, 3000))
volume("others-write", 0o646)
volume("stranger", 0o444, (4242, 3000))
volume("tmpfs-open", 0o444, options="rw", folder=0o777)
volume("no-mount", 0o444, kind="")
os.mkdir("away")
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "away"], check=True)
os.symlink(os.path.abspath("ro-0444/token"), "away/token")
subprocess.run(["mount", "-o", "remount,ro", "away"], check=True)
os.setgroups([3000])
os.setgid(2000)
os.setuid(2000)
names = [name for name in sorted(os.listdir("."))]
found = {}
for outside in (False, True):
    if outside:
        del os.environ["KUBERNETES_SERVICE_HOST"]
    for name in names:
        try:
            secret = read_token_file(f"{name}/token", where="--token-file")
            found[f"{name} {outside}"] = secret == Secret(b"k" * 32)
        except ConfigError as error:
            found[f"{name} {outside}"] = error.what
print(json.dumps(found))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a volume")
def test_a_secret_volume_is_read_in_kubernetes_only() -> None:
    with tempfile.TemporaryDirectory() as work:  # pytest's own folders are closed to other users
        Path(work).chmod(0o755)
        done = subprocess.run(
            ["unshare", "--mount", sys.executable, "-B", "-c", IN_VOLUME],
            cwd=work,
            env={**os.environ, "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    if "Operation not permitted" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    found = json.loads(done.stdout or pytest.fail(done.stderr))
    good = {name for name, outcome in found.items() if outcome is True}
    assert good == {f"{name} False" for name in ("ro-0444", "ro-0440", "ro-0644", "tmpfs-0440")}
    assert {found[f"{name} True"] for name in ("ro-0444", "away")} == {"is a symbolic link"}
    assert found["stranger False"] == "is a symbolic link"


def test_a_link_that_anyone_could_make_is_refused_in_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    file = tmp_path / "file"
    file.write_text(format_token(Secret(b"k" * 32)))
    file.chmod(0o600)
    link = tmp_path / "token"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="is a symbolic link; mount the Secret read-only"):
        read_token_file(str(link), where="--token-file")
    assert read_token_file(str(file), where="--token-file") == Secret(b"k" * 32)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can access it"):
        read_token_file(str(file), where="--token-file")
