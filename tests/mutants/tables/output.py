"""The workers' lines: terminal, log files, backpressure."""

from __future__ import annotations

from tests.mutants.model import Mutant

OUTPUT = "launcher/output/"
PDRUN = "pdrun/"
BACKPRESSURE = "tests/launcher/output/test_backpressure.py::test_"
CONSOLE = "tests/launcher/output/test_console.py::test_"
FORMATTING = "tests/launcher/output/test_formatting.py::test_"
LINE_SPLITTER = "tests/launcher/output/test_line_splitter.py::test_"
LOG_FILES = "tests/launcher/output/test_log_files.py::test_"
PLAIN_LIMITS = "tests/launcher/output/test_plain_limits.py::test_"
ROUTER = "tests/launcher/output/test_router.py::test_"
DISK = "tests/pdrun/test_disk.py::test_"


MUTANTS = (
    Mutant(
        "holes of a log are read",
        "launcher/jobs/log_reader.py",
        "for start, stop in list_parts(fd, self.offset, end):",
        "for start, stop in ((self.offset, end),):",
        "tests/launcher/jobs/test_logs.py::test_holes_of_a_log_are_neither_read_nor_shown",
    ),
    Mutant(
        "a worker's escapes reach the terminal",
        f"{OUTPUT}formatting.py",
        "            text = escape_controls(text)\n",
        "            pass\n",
        f"{CONSOLE}escapes_of_a_worker_are_neutralised_on_a_terminal",
    ),
    Mutant(
        "a worker's escapes pass where it is alone",
        f"{OUTPUT}formatting.py",
        (
            "return escape_controls(data, in_place=True) if self._is_terminal else data\n"
            "\n    def finish"
        ),
        "return data\n\n    def finish",
        f"{FORMATTING}one_worker_s_prompt_and_bar_pass_at_once_on_a_terminal",
    ),
    Mutant(
        "cursor movements pass as colours",
        f"{OUTPUT}formatting.py",
        '_SGR = r"\\x1b\\[[0-9;:]*m"',
        '_SGR = r"\\x1b\\[[0-9;:]*[mH]"',
        f"{FORMATTING}escapes_are_shown_not_obeyed",
    ),
    Mutant(
        "a colour runs on into the next line",
        f"{OUTPUT}formatting.py",
        '                text += b"\\x1b[0m"',
        "                pass",
        f"{FORMATTING}a_colour_that_is_left_on_ends_with_its_line",
    ),
    Mutant(
        "a line without end stays in memory",
        f"{OUTPUT}line_splitter.py",
        "while len(self._partial_line) - start > self._max_piece_bytes:",
        "while False:",
        f"{PLAIN_LIMITS}a_line_without_end_is_cut_into_pieces",
    ),
    Mutant(
        "a character is cut in two",
        f"{OUTPUT}line_splitter.py",
        "self._partial_line[cut] & 0xC0 == 0x80",
        "False",
        f"{LINE_SPLITTER}a_cut_never_falls_inside_a_character",
    ),
    Mutant(
        "a log follows a link",
        f"{PDRUN}disk.py",
        "os.O_NOFOLLOW | os.O_NOCTTY",
        "os.O_NOCTTY",
        f"{DISK}no_link_below_the_root_is_followed",
    ),
    Mutant(
        "a log in another user's folder is written",
        f"{PDRUN}disk.py",
        (
            "    if reason := foreign_owner(os.fstat(fd)):\n        os.close(fd)\n       "
            ' raise PermissionError(errno.EPERM, f"{path}'
        ),
        (
            '    if reason := "":\n        os.close(fd)\n        raise '
            'PermissionError(errno.EPERM, f"{path}'
        ),
        f"{DISK}nothing_of_another_user_is_used",
    ),
    Mutant(
        "a log is readable for others",
        f"{PDRUN}disk.py",
        "flags | more, 0o600",
        "flags | more, 0o644",
        f"{DISK}folders_and_files_are_made_for_this_user_alone",
    ),
    Mutant(
        "a slow disk is not waited for",
        f"{OUTPUT}log_files.py",
        "self._backlog_bytes >= self._max_backlog\n                and time",
        "False\n                and time",
        f"{LOG_FILES}a_slow_disk_holds_the_workers_and_tells_when_there_is_room",
    ),
    Mutant(
        "a hung disk holds the workers for ever",
        f"{OUTPUT}log_files.py",
        "and time.monotonic() - self._progress_at < self._hung_seconds",
        "",
        f"{LOG_FILES}a_disk_that_hangs_hangs_the_thread_and_nobody_else",
    ),
    Mutant(
        "lost bytes are not counted",
        f"{OUTPUT}log_files.py",
        "            file.lost_bytes += count\n            file.reason = reason",
        "            file.reason = reason",
        f"{LOG_FILES}a_disk_that_is_full_for_a_while_loses_only_what_it_refused",
    ),
    Mutant(
        "what a hung disk did not take is not counted",
        f"{OUTPUT}log_files.py",
        "                    self._drop_queue()\n                    break",
        "                    break",
        f"{LOG_FILES}a_disk_that_hangs_hangs_the_thread_and_nobody_else",
    ),
    Mutant(
        "a log name leaves the folder",
        f"{OUTPUT}log_names.py",
        'any(part in ("", ".", "..") for part in template.split("/"))',
        "False",
        f"{LOG_FILES}templates_that_are_refused",
    ),
    Mutant(
        "a value adds a folder to a log name",
        f"{OUTPUT}log_names.py",
        'return re.sub(r"[^A-Za-z0-9._:-]", "_", value).lstrip(".") or "_"',
        "return value",
        f"{PLAIN_LIMITS}a_value_adds_no_folder_to_a_name",
    ),
    Mutant(
        "two ranks write one log",
        f"{OUTPUT}log_names.py",
        '    return template + "_{rank}"',
        "    return template",
        f"{LOG_FILES}names",
    ),
    Mutant(
        "a hidden rank fails unseen",
        f"{OUTPUT}router.py",
        "if worker is None or not worker.is_hidden or worker.is_tail_shown:",
        "if True:",
        f"{ROUTER}hidden_ranks_are_logged_and_revealed_when_they_fail",
    ),
    Mutant(
        "a hidden rank waits for the terminal",
        f"{OUTPUT}router.py",
        "ignores_terminal = stream.formatter is None and not is_disk_behind",
        "ignores_terminal = False",
        f"{BACKPRESSURE}pipes_whose_reader_is_behind_are_left_alone",
    ),
    Mutant(
        "pipes are read although nobody reads",
        f"{OUTPUT}router.py",
        "if stream.number not in held or ignores_terminal:",
        "if True:",
        f"{BACKPRESSURE}pipes_whose_reader_is_behind_are_left_alone",
    ),
    Mutant(
        "a pipe that a descendant holds open is waited for",
        f"{OUTPUT}router.py",
        "deadline = time.monotonic() + timeout\n",
        "deadline = time.monotonic() + 5.0\n",
        f"{ROUTER}drain_takes_the_rest_and_is_bounded_by_its_timeout",
    ),
    Mutant(
        "pdrun's line continues a worker's",
        f"{OUTPUT}console.py",
        "        if self._stderr.mid_line:\n",
        "        if False:\n",
        f"{CONSOLE}our_own_line_never_stands_behind_half_a_line",
    ),
    Mutant(
        "stdout and stderr of one terminal are out of order",
        f"{OUTPUT}console.py",
        "if not _is_same_file(out, err):",
        "if True:",
        f"{CONSOLE}order_over_both_streams_of_one_terminal",
    ),
)
