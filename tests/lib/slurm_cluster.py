"""
Slurm on the hosts of `tests.lib.netns_hosts`: munged and slurmd on each, slurmctld on the first; no
systemd.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path

from tests.lib.netns_hosts import Hosts, run

NEEDED = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "scancel", "sinfo")
CGROUPS = (
    "mkdir -p /sys/fs/cgroup",
    "mountpoint -q /sys/fs/cgroup || mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup",
    (
        "for c in cpuset memory freezer devices cpu cpuacct; do mkdir -p /sys/fs/cgroup/$c;"
        " mount -t cgroup -o $c cgroup /sys/fs/cgroup/$c 2>/dev/null || true; done"
    ),
    (
        "mkdir -p /sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd cgroup"
        " /sys/fs/cgroup/systemd || true"
    ),
)
"""Lines of a host's start: ``ip netns exec`` laid a bare /sys, and slurmd looks for cgroups."""
OWN_CGROUPS = ("freezer", "cpuset", "devices")
"""Hierarchies of cgroup v1 in which slurmd makes groups for its jobs."""


def own_cgroup_mounts(name: str) -> tuple[str, ...]:
    """
    Return lines of a host's start that give the host a part of each hierarchy as its root.

    ``name`` is the beginning of the parts' names. `remove_cgroups` removes them.
    """
    kinds = " ".join(OWN_CGROUPS)
    return (
        f"for c in {kinds}; do mkdir -p /sys/fs/cgroup/$c/{name}-$H; done",
        "for f in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$f >"
        f" /sys/fs/cgroup/cpuset/{name}-$H/$f; done",
        f"for c in {kinds}; do mount --bind /sys/fs/cgroup/$c/{name}-$H /sys/fs/cgroup/$c; done",
    )


def remove_cgroups(name: str) -> None:
    """Remove the groups that `own_cgroup_mounts` and slurmd made. Their processes have ended."""
    for kind in OWN_CGROUPS:
        for top in Path("/sys/fs/cgroup", kind).glob(f"{name}-*"):
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def missing_cgroups() -> str:
    """Return why slurmd cannot use cgroups here, or the empty string."""
    lacking = [kind for kind in OWN_CGROUPS if not Path("/sys/fs/cgroup", kind, "tasks").exists()]
    return f"no cgroup v1 of {', '.join(lacking)}" if lacking else ""


def missing() -> str:
    """Return why there can be no Slurm here, or the empty string."""
    if lacking := [
        name
        for name in NEEDED
        if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists()
    ]:
        return (
            f"needs {', '.join(lacking)} (Debian: slurmctld slurmd slurm-client"
            " slurm-wlm-basic-plugins munge)"
        )
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "needs the user munge"
    return ""


class Slurm:
    """See the module."""

    def __init__(self, hosts: Hosts, folder: Path, *, uses_cgroups: bool = False) -> None:
        """``uses_cgroups``: slurmd tracks and confines jobs by cgroup v1 (`own_cgroup_mounts`)."""
        self.hosts, self.folder, self._uses_cgroups = hosts, folder, uses_cgroups
        self.conf = folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "key"
        key.write_bytes(os.urandom(128))
        shutil.chown(key, "munge")
        key.chmod(0o400)
        self.conf.write_text(self._text())
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=yes\n"
            "ConstrainDevices=yes\nConstrainRAMSpace=no\n"
        )
        for name in self.hosts.names:
            self.boot(name)
        self._start(self.hosts.names[0], "slurmctld", "-f", str(self.conf), "-D")
        self.wait_idle(len(self.hosts.names))

    def _text(self) -> str:
        hosts, folder = self.hosts, self.folder
        plugin = {"proctrack": "linuxproc", "task": "none"}
        if self._uses_cgroups:
            plugin = dict.fromkeys(plugin, "cgroup")
        lines = f"""
            ClusterName=test
            SlurmctldHost={hosts.names[0]}({hosts.address(hosts.names[0])})
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            StateSaveLocation={folder}/state
            SlurmdSpoolDir=/run/slurmd
            SlurmctldPidFile=/run/slurmctld.pid
            SlurmdPidFile=/run/slurmd.pid
            SlurmctldLogFile={folder}/ctld.log
            SlurmdLogFile={folder}/%n.log
            ProctrackType=proctrack/{plugin["proctrack"]}
            TaskPlugin=task/{plugin["task"]}
            SwitchType=switch/none
            MpiDefault=none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU
            ReturnToService=2
            SlurmctldTimeout=10
            SlurmdTimeout=60
            KillWait=12
            MinJobAge=300
            SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none
            SlurmdParameters=config_overrides
        """
        nodes = [
            f"NodeName={name} NodeAddr={hosts.address(name)} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for name in hosts.names
        ]
        part = (
            f"PartitionName=all Nodes={','.join(hosts.names)} Default=YES MaxTime=INFINITE State=UP"
        )
        return "\n".join([*(line.strip() for line in lines.splitlines()), *nodes, part]) + "\n"

    def boot(self, name: str) -> None:
        """Start the daemons of one host."""
        folder = self.folder
        munged = (
            "mkdir -p /run/munge /run/slurmd; chown munge /run/munge; runuser -u munge --"
            f" /usr/sbin/munged --force --key-file={folder}/key --pid-file=/run/munge/pid"
            " --log-file=/run/munge/log --seed-file=/run/munge/seed"
        )
        run(*self.hosts.enter(name), "sh", "-c", munged)
        self._start(name, "slurmd", "-f", str(self.conf), "-N", name, "-D")

    def _start(self, name: str, *argv: str) -> None:
        out = (self.folder / f"{name}.{argv[0]}.out").open("ab")
        self._processes.append(
            self.hosts.start(
                name,
                argv,
                cwd=self.folder,
                env={**os.environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        )

    def ask(self, *argv: str) -> str:
        """Run a command of Slurm on the first host; return what it printed."""
        done = run(
            *self.hosts.enter(self.hosts.names[0]),
            "env",
            f"SLURM_CONF={self.conf}",
            *argv,
            check=False,
        )
        return done.stdout + done.stderr

    def wait_idle(self, count: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while (found := self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip()) != str(count):
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))
                raise RuntimeError(
                    f"{found} of {count} nodes are idle: {self.ask('sinfo', '-N', '-l')}\n{logs}"
                )
            time.sleep(0.1)

    def fields(self, job: str) -> dict[str, str]:
        """
        Return what ``scontrol show job`` tells, all of one moment; empty where there is no such
        job.
        """
        text = self.ask("scontrol", "show", "job", job, "--oneliner")
        return {
            name: value
            for name, equals, value in (word.partition("=") for word in text.split())
            if equals
        }

    def field(self, job: str, name: str) -> str:
        return self.fields(job).get(name, "")

    def start_again(self, job: str, timeout: float = 120.0) -> None:
        """
        Wait until a requeued job has started for the second time, without the two minutes that
        Slurm lets pass.

        Not in the second of its end, though: credentials are dated in whole seconds, and a node
        that was told to end the job refuses one that is not younger than that ("Job credential
        revoked" in slurmctld's log). Slurm then calls the job FAILED, and its script was never run.
        """
        hurried, deadline = False, time.monotonic() + timeout
        while True:
            now = self.fields(job)
            if now.get("Restarts") == "1" and now["JobState"] in ("RUNNING", "COMPLETED", "FAILED"):
                return
            if now.get("Restarts") == "1" and now["JobState"] == "PENDING" and not hurried:
                hurried = self.ask("scontrol", "update", f"job={job}", "StartTime=now+2") == ""
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"job {job} does not start again: {now}\n{self.ask('sinfo', '-N', '-l')}"
                )
            time.sleep(0.1)

    def wait_state(self, job: str, *states: str, timeout: float = 60.0) -> str:
        deadline = time.monotonic() + timeout
        while (found := self.field(job, "JobState")) not in states:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"job {job} is {found}, not {states}:"
                    f" {self.ask('scontrol', 'show', 'job', job)}"
                )
            time.sleep(0.1)
        return found
