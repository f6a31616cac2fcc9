"""What the workers print reaches the terminal and the files, whole."""

from __future__ import annotations

import re
from collections import Counter

from tests.e2e.conftest import Shell

WRITER = """
import os, random, sys
rank, lines = os.environ["RANK"], 25000
random.seed(int(rank))
data = b"".join(b"rank %s line %d %s\\n" % (rank.encode(), i, b"x" * random.randrange(40)) for i in range(lines))
at = 0
while at < len(data):
    step = random.randrange(1, 4000)
    os.write(1, data[at:at + step])
    at += step
"""


def test_a_hundred_thousand_lines_none_mixed_none_lost(shell: Shell) -> None:
    code, out, err = shell.run(
        "--nodes", "2", "--devices", "2", "--local", shell.script(WRITER), timeout=120
    )
    assert code == 0, err
    lines = out.splitlines()
    pattern = re.compile(r"node(\d):(\d)\| rank (\d) line (\d+) x*")
    matches = [pattern.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if not match][:3]
    assert Counter(match[3] for match in matches if match) == dict.fromkeys("0123", 25000)
    for rank in "0123":
        assert [int(m[4]) for m in matches if m and m[3] == rank] == list(range(25000))
    (run,) = [path for path in (shell.folder / "pdrun-logs").iterdir() if path.is_dir()]
    for rank in range(4):
        assert (run / "0" / f"rank_{rank}.out").read_text().count("\n") == 25000


def test_a_line_of_five_megabytes_is_neither_mixed_nor_lost(shell: Shell) -> None:
    script = shell.script(
        "import os, sys\n"
        "sys.stdout.write(os.environ['RANK'] * 5_000_000 + '\\n')\n"
        "for i in range(200): print('short', os.environ['RANK'])\n"
    )
    code, out, err = shell.run("--devices", "2", script, timeout=90)
    assert code == 0, err
    assert (out.count("short 0"), out.count("short 1")) == (200, 200)
    pieces = re.findall(r"^\S+:([01])[|+] ([01]+)$", out, re.MULTILINE)
    for rank in "01":
        text = "".join(text for prefix, text in pieces if prefix == rank)
        assert text == rank * 5_000_000
    (run,) = [path for path in (shell.folder / "pdrun-logs").iterdir() if path.is_dir()]
    assert (run / "0" / "rank_1.out").stat().st_size == 5_000_001 + 200 * 8


def test_one_worker_has_no_prefix_and_its_streams_stay_apart(shell: Shell) -> None:
    script = shell.script("import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n")
    code, out, err = shell.run("--devices", "1", script)
    assert (code, out) == (0, "to out\n")
    assert "to err\n" in err


def test_the_log_folder_is_named_at_start_and_end(shell: Shell) -> None:
    code, _, err = shell.run("--devices", "2", shell.script("print('x')\n"))
    (run,) = [path for path in (shell.folder / "pdrun-logs").iterdir() if path.is_dir()]
    assert code == 0
    assert err.count(f"pdrun-logs/{run.name}") >= 2
    assert (run / "events.jsonl").exists()
    assert (shell.folder / "pdrun-logs" / ".gitignore").read_text().strip() == "*"


def test_hidden_ranks_are_hidden_and_a_failed_one_is_not(shell: Shell) -> None:
    script = shell.script(
        "import os, sys, time\n"
        "print('I am', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] != '1': sys.exit(0)\n"
        "while not os.path.exists('others'): time.sleep(0.01)\n"
        "sys.exit('why')\n"
    )
    job = shell.start("--devices", "3", "--show-ranks", "0", script)
    job.expect("I am 0")
    (shell.folder / "others").touch()
    assert job.wait() == 1
    assert "I am 2" not in job.out and "why" in job.err


def test_a_hidden_rank_that_fails_is_told_once_with_the_file_that_says_why(shell: Shell) -> None:
    script = shell.script("import sys\nprint('the reason')\nsys.exit(3)\n")
    code, out, err = shell.run("--devices", "1", "--show-ranks", "none", script)
    assert code == 3
    assert (out + err).count("the reason") == 1, err
    assert "rank 0 failed; its last line (hidden by --show-ranks;" in err
    assert "/0/rank_0.out" in err and "rank_0.err" not in err


def test_ranks_to_show_that_the_job_does_not_have_are_a_warning(shell: Shell) -> None:
    code, _, err = shell.run(
        "--devices", "2", "--show-ranks", "0,7-9", shell.script("print('x')\n")
    )
    assert code == 0
    assert (
        err.count("pdrun: warning: --show-ranks 0,7-9: there is no rank 7-9; the ranks are 0-1")
        == 1
    )


def test_status_logs_and_stop_of_a_running_job(shell: Shell) -> None:
    script = shell.script("import time\nprint('working', flush=True)\ntime.sleep(300)\n")
    job = shell.start("--devices", "2", "--job", "demo", script)
    job.expect("working", count=2)
    code, out, err = shell.run("status", "demo")
    assert code == 0 and "demo" in out and "running" in out, out + err
    code, out, err = shell.run("logs", "demo")
    assert code == 0 and out.count("working") == 2, out + err
    code, out, err = shell.run("stop", "demo")
    assert code == 0, out + err
    assert job.wait(20) == 143
    code, out, err = shell.run("status", "demo")
    assert code == 0 and "143" in out, out + err
    code, out, err = shell.run("status", "demo", "--follow")
    assert code == 0 and "143" in out, out + err
    code, out, err = shell.run("status", "demmo")
    assert code == 2 and "demo" in err
