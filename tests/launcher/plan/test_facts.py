"""
Facts: what is read from this machine, without torch, without the network, without running anything
of the user's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.launcher.common import network
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Output, Program, Resources
from pdrun.launcher.plan import facts, program


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    return path


def spec(nodes: int = 1, **place: object) -> JobSpec:
    return JobSpec(
        Program("script", "train.py"),
        Resources(nodes=nodes, backend="cpu"),
        place=ClusterOptions(**place),
    )  # type: ignore[arg-type]


def test_a_job_of_one_node_does_not_use_the_network(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("list_addresses", "find_local_address", "is_this_machine", "resolve_host"):
        monkeypatch.setattr(network, name, asked)
    for one in (spec(), spec(2, local=True), spec(2, simulated=(0, 2), node_rank=0)):
        found = facts.gather_facts(one, {"PATH": "/bin"})
        assert found.addresses == (("lo", "127.0.0.1"),)
        assert (found.route_address, found.is_scheduler_local, found.script_digest) == (
            "127.0.0.1",
            None,
            "",
        )


def test_several_nodes_know_their_route_and_script(script: Path) -> None:
    found = facts.gather_facts(spec(2, scheduler=Endpoint("127.0.0.1", 5)), {"PATH": "/bin"})
    assert found.is_scheduler_local is True
    assert found.route_address == "127.0.0.1"
    assert ("lo", "127.0.0.1") in found.addresses
    assert len(found.script_digest) == 64
    assert (found.mentions_torch, found.program_error, found.log_error) == (True, "", "")
    assert found.scheduler_error == ""


def test_an_unknown_scheduler_name_is_not_this_machine(script: Path) -> None:
    found = facts.gather_facts(
        spec(2, scheduler=Endpoint("no-such-host.invalid", 5)), {"PATH": "/bin"}
    )
    assert (found.is_scheduler_local, found.route_address) == (False, "")
    assert found.scheduler_error.startswith("the name 'no-such-host.invalid' is not known here: ")


def test_a_scheduler_name_that_is_loopback_on_this_machine(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's 127.0.1.1: the others know the name by an address of an interface."""
    names = {"here": ("127.0.1.1",), "near": ("127.0.1.1", "10.9.9.9")}
    own = (("lo", "127.0.0.1"), ("eth0", "fe80::1%eth0"), ("eth0", "10.9.9.9"))
    monkeypatch.setattr(network, "resolve_host", names.__getitem__)
    monkeypatch.setattr(network, "list_addresses", lambda: own)
    monkeypatch.setattr(network, "_find_source_address", lambda host, port: "")
    found = facts.gather_facts(spec(2, scheduler=Endpoint("here", 5)), {"PATH": "/bin"})
    assert (found.is_loopback_name, found.route_address, found.is_scheduler_local) == (
        True,
        "10.9.9.9",
        True,
    )
    assert (
        facts.gather_facts(
            spec(2, scheduler=Endpoint("near", 5)), {"PATH": "/bin"}
        ).is_loopback_name
        is False
    )
    monkeypatch.setattr(network, "list_addresses", lambda: (("lo", "127.0.0.1"),))
    assert (
        facts.gather_facts(
            spec(2, scheduler=Endpoint("here", 5)), {"PATH": "/bin"}
        ).is_loopback_name
        is False
    )


def test_every_name_of_this_machine_is_recognised() -> None:
    own = network.list_addresses()
    assert network.is_this_machine("localhost", "host", own)
    assert network.is_this_machine("host", "host", own)
    assert network.is_this_machine("127.0.0.53", "host", own)
    assert all(
        network.is_this_machine(address.partition("%")[0], "host", own) for _, address in own
    )
    assert not network.is_this_machine("192.0.2.77", "host", own)


def test_backend_cpu_probes_no_accelerator(script: Path) -> None:
    (only,) = facts.gather_facts(spec(), {}).backends
    assert (only.name, only.present) == ("cpu", True)


def test_the_torch_version_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "import typing\n__version__ = '2.99.0+cu'\ncuda = None\n"
    )
    assert facts.read_torch_version([str(tmp_path / "nowhere"), str(tmp_path)]) == "2.99.0+cu"
    assert facts.read_torch_version([]) == ""


def test_paths_are_relative_to_chdir(script: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.py").write_text("")
    (tmp_path / "inner" / "file").write_text("")
    asked = JobSpec(
        Program("script", "other.py"),
        Resources(backend="cpu"),
        output=Output(log_dir="file"),
        chdir="inner",
    )
    found = facts.gather_facts(asked, {})
    assert found.cwd == str(tmp_path / "inner")
    assert found.program_error == ""
    assert "is not a directory" in found.log_error


def test_a_module_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(
        "PYTHONPATH", raising=False
    )  # with another one the workers' interpreter may find another module
    package = tmp_path / "some_package" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "train.py").write_text("import torch\n")
    found = program.check_program(Program("module", "some_package.inner.train"), str(tmp_path), {})
    assert (found.error, found.file, found.mentions_torch) == ("", str(package / "train.py"), True)
    found = program.check_program(Program("module", "some_package.inner.trian"), str(tmp_path), {})
    assert found.error == "no module named 'some_package.inner.trian'"
    assert (
        "without a __main__"
        in program.check_program(Program("module", "some_package"), str(tmp_path), {}).error
    )
    assert "some_package" not in sys.modules


def test_a_module_is_not_checked_with_another_module_path(tmp_path: Path) -> None:
    assert (
        program.check_program(
            Program("module", "nowhere"), str(tmp_path), {"PYTHONPATH": "/elsewhere"}
        ).error
        == ""
    )
    assert (
        program.check_program(
            Program("module", "nowhere", python=sys.executable), str(tmp_path), {}
        ).error
        == ""
    )


def test_a_command_is_searched_in_the_workers_path(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    asked = Program("command", "tool")
    assert program.check_program(asked, "/", {"PATH": f"/nope:{tmp_path}"}).exit_code == 0
    assert program.check_program(asked, "/", {"PATH": "/nope"}).exit_code == 127
    tool.chmod(0o644)
    assert program.check_program(asked, "/", {"PATH": str(tmp_path)}).exit_code == 127
    assert program.check_program(Program("command", str(tool)), "/", {}).exit_code == 126


def test_an_inaccessible_folder_is_an_error_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def closed(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if str(self).startswith("/closed"):
            raise PermissionError(13, "Permission denied")
        return real(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    assert (
        program.check_program(
            Program("command", "env"), "/", {"PATH": "/closed/bin:/usr/bin:/bin"}
        ).exit_code
        == 0
    )
    assert (
        "Permission denied"
        in program.check_program(Program("script", "/closed/x.py"), "/", {}).error
    )
    found = program.check_program(Program("command", "/closed/x"), "/", {})
    assert (found.exit_code, found.error) == (
        126,
        "'/closed/x' cannot be accessed: Permission denied",
    )  # as a shell says


def test_a_directory_with_a_main_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    assert program.check_program(Program("script", "app"), str(tmp_path), {}).error == ""


def test_a_fifo_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert (
        "not a regular file"
        in program.check_program(Program("script", "pipe.py"), str(tmp_path), {}).error
    )
