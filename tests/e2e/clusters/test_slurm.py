"""
Slurm for real: srun and sbatch, time limits, a lost node, requeue; and the batch scripts that pdrun
writes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import UsageError
from pdrun.launcher.cli.clusters.slurm import make_batch_script, slurm_group
from pdrun.launcher.config.spec import JobSpec, Policy, Program
from pdrun.launcher.jobs import sbatch as slurmjobs
from pdrun.launcher.jobs.sbatch import BatchJob
from pdrun.launcher.jobs.sbatch_checks import parse_time_limit
from pdrun.launcher.plan import external as through
from tests.e2e.clusters.conftest import Cluster, until
from tests.lib.slurm_cluster import Slurm
from tests.lib.tiers import thorough

REAL = [pytest.mark.root, pytest.mark.slow]
SHOW = (
    "import json, os, sys\njson.dump([sys.argv[1:], os.uname().nodename, os.environ['WORLD_SIZE'],"
    " os.environ.get('SLURM_JOB_ID'), os.environ.get('SLURM_PROCID')], open(os.environ['RANK'] +"
    " '.json', 'w'))\n"
)
SAVE = (
    "import os, signal, sys, time\ndef save(n, f):\n    time.sleep(1);"
    " open(f\"{os.environ['RANK']}.saved{n}\", 'w').close();"
    " sys.exit(0)\nsignal.signal(signal.SIGTERM, save); signal.signal(signal.SIGUSR1,"
    " save)\nopen(f\"{os.environ['RANK']}.up\", 'w').close()\nwhile True: time.sleep(0.05)\n"
)

COUNT = (
    "import os, signal, time\n"
    "def note(n, f): open(os.environ['RANK'] + '.seen', 'a').write(f'{n} ')\n"
    "signal.signal(signal.SIGUSR1, note); signal.signal(signal.SIGTERM, note)\n"
    "open(os.environ['RANK'] + '.up', 'w').close()\n"
    "while not os.path.exists('stop'): time.sleep(0.02)\n"
    "time.sleep(0.3)\n"
)


def submit(cluster: Cluster, slurmed: Slurm, *words: str, body: str = "", head: str = "") -> str:
    """Submit a batch script of the test's own; return the job's number."""
    command = " ".join([sys.executable, "-m", "pdrun", *words])
    text = (
        "#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=1"
        f" --open-mode=append\n{head}\n{body or 'exec ' + command}\n"
    )
    (cluster.folder / "job.sh").write_text(text)
    code, out, err = cluster.run(
        "sbatch", "--parsable", "-o", str(cluster.folder / "job.out"), "job.sh", env=conf(slurmed)
    )
    assert code == 0, err
    return out.strip()


def conf(slurmed: Slurm) -> dict[str, str]:
    return {"SLURM_CONF": str(slurmed.conf)}


def output(cluster: Cluster) -> str:
    path = cluster.folder / "job.out"
    return path.read_text() if path.exists() else ""


def up(cluster: Cluster, count: int = 3) -> None:
    until(
        lambda: all((cluster.folder / f"{rank}.up").exists() for rank in range(count)),
        "all workers run",
        60,
    )


class TestReal:
    pytestmark = REAL

    def test_srun_starts_one_agent_a_node(self, cluster: Cluster, slurmed: Slurm) -> None:
        script = cluster.script(SHOW)
        pdrun = [sys.executable, "-m", "pdrun", "--devices", "2", script, "a b", "$x"]
        code, _, err = cluster.run("srun", "-N3", "--ntasks-per-node=1", *pdrun, env=conf(slurmed))
        assert code == 0, err
        found = [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(6)]
        assert [row[1] for row in found] == ["h1", "h1", "h2", "h2", "h3", "h3"]
        assert all(
            row[0] == ["a b", "$x"] and row[2] == "6" and row[3] and row[4] is None for row in found
        )
        assert err.count("6 workers on 3 nodes") == 1

    def test_the_body_of_a_batch_script_uses_all_nodes(
        self, cluster: Cluster, slurmed: Slurm
    ) -> None:
        job = submit(cluster, slurmed, "--devices", "2", cluster.script(SHOW), "'a b'", "'$x'")
        assert slurmed.wait_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(cluster)
        found = [json.loads((cluster.folder / f"{rank}.json").read_text()) for rank in range(6)]
        assert [row[1] for row in found] == ["h1", "h1", "h2", "h2", "h3", "h3"]
        assert all(row == [["a b", "$x"], row[1], "6", job, None] for row in found)
        assert "srun: " not in output(cluster)

    def test_the_workers_code_is_the_batch_jobs(self, cluster: Cluster, slurmed: Slurm) -> None:
        script = cluster.script(
            "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(42)\ntime.sleep(60)\n"
        )
        job = submit(cluster, slurmed, script)
        assert slurmed.wait_state(job, "COMPLETED", "FAILED") == "FAILED"
        assert slurmed.field(job, "ExitCode") == "42:0"
        assert "rank 2 on h3 failed: exit code 42" in output(cluster)

    @pytest.mark.parametrize("number", ["TERM", thorough("USR1")])
    def test_a_notice_before_the_end_leads_to_a_save(
        self, number: str, cluster: Cluster, slurmed: Slurm
    ) -> None:
        """
        --signal reaches the step's tasks; --signal=TERM@55 of a one-minute job is due within
        seconds.
        """
        job = submit(
            cluster, slurmed, cluster.script(SAVE), head=f"#SBATCH --time=1 --signal={number}@55"
        )
        up(cluster)
        slurmed.wait_state(job, "COMPLETED", "FAILED", "TIMEOUT", timeout=110)
        saved = f"saved{int(getattr(signal, f'SIG{number}'))}"
        assert all((cluster.folder / f"{rank}.{saved}").exists() for rank in range(3)), output(
            cluster
        )
        assert slurmed.field(job, "ExitCode") == ("143:0" if number == "TERM" else "0:0")

    @pytest.mark.parametrize("how", ["tasks of srun", "body"])
    def test_a_signal_reaches_a_worker_once(
        self, how: str, cluster: Cluster, slurmed: Slurm
    ) -> None:
        script = cluster.script(COUNT)
        body = f"srun --ntasks-per-node=1 {sys.executable} -m pdrun {script}"
        job = submit(cluster, slurmed, script, body=body if how != "body" else "")
        up(cluster)
        for name, seen in (("USR1", "10 "), ("TERM", "10 15 ")):
            code, _, err = cluster.run("scancel", f"--signal={name}", job, env=conf(slurmed))
            assert code == 0, err
            files = [cluster.folder / f"{rank}.seen" for rank in range(3)]
            until(
                lambda files=files, seen=seen: all(
                    path.exists() and len(path.read_text()) >= len(seen) for path in files
                ),
                f"every worker has SIG{name}",
            )
        cluster.script("", "stop")
        slurmed.wait_state(job, "COMPLETED", "FAILED", "CANCELLED")
        assert [path.read_text() for path in files] == ["10 15 "] * 3
        assert "the scheduler does not answer" not in output(cluster)

    def test_scancel_leads_to_a_save_within_slurms_patience(
        self, cluster: Cluster, slurmed: Slurm
    ) -> None:
        job = submit(cluster, slurmed, cluster.script(SAVE))
        up(cluster)
        assert cluster.run("pdrun", "slurm", "cancel", job, env=conf(slurmed))[0] == 0
        slurmed.wait_state(job, "CANCELLED")
        until(
            lambda: all((cluster.folder / f"{rank}.saved15").exists() for rank in range(3)),
            "all have saved",
        )
        cluster.nothing_left(30)

    @pytest.mark.timeout(400)
    def test_requeue_is_a_new_job_for_pdrun(self, cluster: Cluster, slurmed: Slurm) -> None:
        script = cluster.script(
            "import os, time\nn = os.environ.get('SLURM_RESTART_COUNT',"
            " '0')\nopen(f\"{os.environ['RANK']}.run{n}.\" + os.environ['PDRUN_JOB'],"
            " 'w').close()\nif n == '0':\n    open(f\"{os.environ['RANK']}.up\", 'w').close()\n   "
            " time.sleep(100)\n"
        )
        job = submit(cluster, slurmed, "--grace", "2", script, head="#SBATCH --requeue")
        up(cluster)
        assert slurmed.ask("scontrol", "requeue", job) == ""
        slurmed.start_again(job)
        assert slurmed.wait_state(job, "COMPLETED", "FAILED", timeout=100) == "COMPLETED", output(
            cluster
        )
        names = {path.name for path in cluster.folder.glob("*.run*")}
        assert names == {
            f"{rank}.run{n}.slurm-{job}{'-r1' if n else ''}" for rank in range(3) for n in (0, 1)
        }

    @pytest.mark.timeout(400)
    def test_a_lost_node_ends_the_job_and_slurm_starts_it_again(
        self, cluster: Cluster, slurmed: Slurm
    ) -> None:
        script = cluster.script(
            "import os, time\nn = os.environ.get('SLURM_RESTART_COUNT',"
            " '0')\nopen(f\"{os.environ['RANK']}.of{os.environ['WORLD_SIZE']}.run{n}\","
            " 'w').close()\nif n == '0':\n    open(f\"{os.environ['RANK']}.up\", 'w').close()\n   "
            " time.sleep(100)\n"
        )
        body = (
            f"{sys.executable} -m pdrun --grace 1 {script}; code=$?\n"
            'if [ $code != 0 ] && [ -z "$SLURM_RESTART_COUNT" ]; then\n'
            "    echo code $code; scontrol requeue $SLURM_JOB_ID; sleep 60\nfi"
        )
        job = submit(cluster, slurmed, body=body, head="#SBATCH --requeue")
        up(cluster)
        hosts = slurmed.hosts
        hosts.power_off("h3")
        try:
            until(lambda: "node h3 was lost" in output(cluster), "pdrun notices", 40)
        finally:
            hosts.boot("h3")
            slurmed.boot("h3")
        until(
            lambda: "\ncode 69\n" in output(cluster), f"the script goes on: {output(cluster)}", 60
        )
        slurmed.start_again(job)
        assert slurmed.wait_state(job, "COMPLETED", "FAILED", timeout=120) == "COMPLETED", output(
            cluster
        )
        assert {path.name for path in cluster.folder.glob("*.run1")} == {
            f"{rank}.of3.run1" for rank in range(3)
        }
        slurmed.wait_idle(3, 90)

    def test_submit_status_and_cancel(self, cluster: Cluster, slurmed: Slurm) -> None:
        script = cluster.script(SAVE)
        code, out, err = cluster.run(
            "pdrun",
            "slurm",
            "submit",
            "--nodes",
            "2",
            "--name",
            "my-job",
            "--output",
            "job.out",
            "--devices",
            "2",
            script,
            env=conf(slurmed),
        )
        job = out.strip()
        assert code == 0 and job.isdigit() and f"submitted job {job}" in err
        up(cluster, 4)
        code, out, _ = cluster.run("pdrun", "slurm", "status", job, env=conf(slurmed))
        assert code == 0 and re.match(rf"job {job} \(my-job\): RUNNING, on h\[1-2\], for ", out)
        assert cluster.run("pdrun", "slurm", "cancel", job, env=conf(slurmed))[0] == 0
        slurmed.wait_state(job, "CANCELLED")
        code, _, err = cluster.run("pdrun", "slurm", "status", "99999", env=conf(slurmed))
        assert code == 2 and "Slurm knows no job 99999" in err
        cluster.nothing_left(30)

    def test_the_template_runs(self, cluster: Cluster, slurmed: Slurm) -> None:
        text = (Path(__file__).parents[3] / "templates" / "job.sbatch").read_text()
        assert "exec pdrun --devices auto train.py" in text
        bin = cluster.folder / "bin"
        bin.mkdir()
        (bin / "pdrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m pdrun "$@"\n')
        (bin / "pdrun").chmod(0o755)
        cluster.script(SHOW, "train.py")
        (cluster.folder / "job.sbatch").write_text(
            re.sub(r"^#SBATCH --gpus-per-node.*\n", "", text, flags=re.MULTILINE)
        )
        code, out, err = cluster.run(
            "sbatch",
            "--parsable",
            "job.sbatch",
            env={**conf(slurmed), "PATH": f"{bin}:{os.environ['PATH']}"},
        )
        assert code == 0, err
        assert slurmed.wait_state(out.strip(), "COMPLETED", "FAILED") == "COMPLETED"
        assert (cluster.folder / "1.json").exists()


# What is written, without Slurm
# ---------------------------------------------------------------------------------------


def test_a_script() -> None:
    batch = BatchJob(
        2,
        "train",
        (("time", "1:00:00"), ("exclusive", "")),
        grace=60.0,
        setup=("module load cuda",),
    )
    assert (
        slurmjobs.render_script(batch, ["pdrun", "--devices", "8", "train.py", "a b", "$x\n"])
        == "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=2\n#SBATCH"
        " --ntasks-per-node=1\n#SBATCH --time=1:00:00\n#SBATCH --exclusive\n# SIGTERM this many"
        " seconds before the time limit: the workers save and exit.\n#SBATCH"
        " --signal=TERM@75\n#SBATCH --requeue\n#SBATCH --open-mode=append\n\nmodule load"
        " cuda\n\nexec pdrun --devices 8 train.py 'a b' '$x\n'\n"
    )


@pytest.mark.parametrize(
    "name",
    [
        "a\n#SBATCH --uid=0",
        "a b",
        "a#b",
        "$(touch x)",
        "`x`",
        "a'b",
        'a"b',
        "a\\b",
        "a\rb",
        "x" * 513,
    ],
)
def test_names_cannot_carry_directives(name: str) -> None:
    with pytest.raises(UsageError):
        slurmjobs.render_script(BatchJob(1, name), ["pdrun"])
    for key, value in ((name, "x"), ("time", name)):
        with pytest.raises(UsageError):
            slurmjobs.make_directive(key, value, "--sbatch")


def test_pdruns_own_directives_are_its_own() -> None:
    for key in (
        *slurmjobs.PDRUN_DIRECTIVES,
        "ntasks-per",
        "sig",
        "wr",
    ):  # sbatch takes any beginning that names one option
        with pytest.raises(UsageError, match="written by pdrun itself"):
            slurmjobs.render_script(BatchJob(1, "", ((key, ""),)), ["pdrun"])
    for key, words in (
        ("nodes", "use --nodes instead"),
        ("job-name", "use --name instead"),
        ("uid", "another user"),
        ("ui", "another user"),
        ("gid", "another user"),
    ):
        with pytest.raises(UsageError, match=words):
            slurmjobs.render_script(BatchJob(1, "", ((key, "3"),)), ["pdrun"])
    with pytest.raises(UsageError, match="--time is given twice"):
        slurmjobs.render_script(BatchJob(1, "", (("time", "1"), ("time", "2"))), ["pdrun"])
    with pytest.raises(UsageError, match="line end"):
        slurmjobs.render_script(BatchJob(setup=("a\nb",)), ["pdrun"])


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (
            "time",
            "30 90:00 1:30:00 2-12 2-12:30 1-0:0:1 UNLIMITED infinite",
            "foo 1h 1:2:3:4 -1 1-2-3 : 1:",
        ),
        ("time-min", "10", "soon"),
        ("mem", "0 4096 64G 500mb", "64X G 1.5G"),
        ("cpus-per-task", "1 16", "0 x 1.5"),
        ("gpus-per-node", "8 a100:4 a100:2,h100:1", "many a100: :4"),
    ],
)
def test_times_sizes_and_counts_are_what_slurm_takes(key: str, good: str, bad: str) -> None:
    for value in good.split():
        assert slurmjobs.make_directive(key, value, f"--{key}") == (key, value)
    for value in bad.split():
        with pytest.raises(UsageError, match=f"--{key}: '.*' is not a "):
            slurmjobs.make_directive(key, value, f"--{key}")


@given(
    st.lists(
        st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20),
        max_size=6,
    )
)
def test_the_shell_gives_back_the_words(words: list[str]) -> None:
    text = slurmjobs.render_script(
        BatchJob(),
        [
            sys.executable,
            "-c",
            "import sys; sys.stdout.buffer.write(ascii(sys.argv[1:]).encode())",
            *words,
        ],
    )
    body = text[text.index("exec ") :]
    if (
        "\r" not in body
    ):  # bash reads scripts byte for byte; Python's own text mode does not matter here
        done = subprocess.run(["bash", "-c", body], capture_output=True, timeout=60)
        assert done.stdout.decode() == ascii(words)


@pytest.mark.parametrize("job", ["", "1;ls", "-1", "1 2", "all", "1\n", "$(id)"])
def test_numbers_of_jobs_are_numbers(job: str) -> None:
    for call in (slurmjobs.query_job, slurmjobs.cancel_job):
        with pytest.raises(UsageError, match="is not a Slurm job number"):
            call(job)


def test_mistakes_in_pdruns_words_are_told_at_once(tmp_path: Path) -> None:
    def render(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pdrun", "slurm", "render", *words],
            text=True,
            capture_output=True,
            cwd=tmp_path,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    code, _, err = render("--devcies", "8", "train.py")
    assert (code, err) == (2, "pdrun: error: no such option --devcies; did you mean '--devices'?\n")
    code, _, err = render("--name", "a\nb", "train.py")
    assert code == 2 and err.startswith(
        "pdrun: error: --name: 'a\\nb' is not allowed in a directive"
    )
    code, out, _ = render(
        "--nodes", "4", "--sbatch", "constraint=a100", "--grace", "2m", "train.py", "--nodes", "7"
    )
    assert code == 0
    assert (
        "#SBATCH --nodes=4\n" in out
        and "#SBATCH --constraint=a100\n" in out
        and "#SBATCH --signal=TERM@135\n" in out
    )
    assert out.endswith("-m pdrun --grace 2m train.py --nodes 7\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nodes 2 --hosts a,b train.py", "--hosts: Slurm chooses the hosts of the job"),
        (
            "--devices 2 --nodes 3 train.py",
            "--nodes: the job needs 3 nodes, but Slurm is asked for 1",
        ),
        ("--nodes 2 --spares 1 train.py", ""),
        ("--gpus-per-node 4 --devices 8 train.py", "--devices: 8 workers per node need as many"),
        ("--gpus-per-node a100:4 --devices 8 train.py", "but Slurm is asked for 4"),
        ("--gpus-per-node a100:4,h100:4 --devices 8 train.py", ""),
        ("--gpus-per-node 1 --devices 8 --backend cpu train.py", ""),
        ("--time 0:30 train.py", "--time: 0:30 is 30 s, but SIGTERM is sent 45 s before the end"),
        ("--time 1 --grace 45 train.py", "--time: 1 is 60 s, but SIGTERM is sent 60 s before"),
        ("--time 1:00:00 train.py", ""),
        ("--time 0 train.py", ""),
        ("--grace 20h train.py", "--grace: must be at most 65520 s in a batch job"),
    ],
)
def test_what_would_fail_in_the_queue_is_refused_before(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    params = slurm_group().commands["render"].make_context("render", words.split()).params
    if message:
        with pytest.raises(UsageError, match=re.escape(message)):
            make_batch_script(params.pop("words"), params)
    else:
        script, missing = make_batch_script(params.pop("words"), params)
        assert script.endswith("train.py\n") and missing is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nope.py", "nope.py"),
        ("--output logs/%j.out train.py", "--output: the folder 'logs' does not exist"),
        ("--output logs-%j/out train.py", ""),
        ("--output out-%j train.py", ""),
        ("--sbatch error=logs/e train.py", "--sbatch error: the folder 'logs' does not exist"),
        ("--sbatch chdir=sub train.py", "train.py"),
        ("--setup pwd nope.py", "nope.py"),
        ("--no-python nope", ""),
    ],
)
def test_a_missing_file_stops_a_submission(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sub").mkdir()
    monkeypatch.setattr(slurmjobs, "submit_script", lambda text: "7")
    submit = slurm_group().commands["submit"]
    if message:
        with pytest.raises(UsageError, match=re.escape(message)):
            submit.main(words.split(), standalone_mode=False)
    else:
        assert submit.main(words.split(), standalone_mode=False) == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("0:30", 30), ("1:00:00", 3600), ("1-0", 86400), ("1-2:03", 93780)],
)
def test_slurms_time_limits(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds
    assert parse_time_limit("UNLIMITED") is None


@pytest.mark.parametrize(
    ("wait", "grace", "source", "fits"),
    [
        (30.0, 30.0, "default", 25.0),
        (None, 30.0, "default", 30.0),
        (60.0, 30.0, "default", 30.0),
        (3.0, 30.0, "default", 1.0),
        (30.0, 45.0, "--grace", 45.0),
        (35.0, 30.0, "default", 30.0),
    ],
)
def test_the_grace_fits_into_killwait(
    wait: float | None, grace: float, source: str, fits: float
) -> None:
    spec = JobSpec(Program("script", "x.py"), policy=Policy(grace=grace))
    found, note = through.fit_grace(spec, wait, {"policy.grace": source})
    assert found.policy.grace == fits
    assert bool(note) == (fits != grace or source != "default")
