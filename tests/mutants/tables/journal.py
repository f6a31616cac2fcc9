"""The journal and the successor of a scheduler that resumes from it."""

from __future__ import annotations

from tests.mutants.model import Mutant

JOURNAL = "rendezvous/journal/"
TEST_JOURNAL = "tests/rendezvous/journal/test_journal.py::test_"
SUCCESSOR_TIME = "tests/rendezvous/journal/test_successor_time.py::test_"


MUTANTS = (
    Mutant(
        "the successor's clock is not shifted",
        f"{JOURNAL}recovery.py",
        "clock_shift=max(0.0, last_time - clock.monotonic()),",
        "clock_shift=0.0,",
        f"{SUCCESSOR_TIME}time_goes_on_where_the_predecessor_was",
    ),
    Mutant(
        "a journal of another job is resumed",
        f"{JOURNAL}recovery.py",
        "(header.job, header.run) != (config.job, config.run) or ",
        "",
        f"{TEST_JOURNAL}a_journal_of_another_job_or_of_other_settings_is_refused",
    ),
    Mutant(
        "a successor that knows less than its nodes goes on",
        f"{JOURNAL}recovery.py",
        "return is_predecessor and commit > self.resumed_commit",
        "return False",
        f"{TEST_JOURNAL}a_successor_refuses_whoever_knows_more_than_the_journal",
    ),
    Mutant(
        "a full disk ends the job",
        f"{JOURNAL}recovery.py",
        "        except OSError as error:\n            path = self._writer",
        "        except BlockingIOError as error:\n            path = self._writer",
        f"{TEST_JOURNAL}a_full_disk_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "a journal that lacks something stays behind",
        f"{JOURNAL}recovery.py",
        "            self.on_lost()\n            self.discard_journal()",
        "            self.on_lost()",
        f"{TEST_JOURNAL}a_full_disk_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "nobody hears that the journal is lost",
        f"{JOURNAL}recovery.py",
        "            self.on_lost()\n",
        "",
        f"{TEST_JOURNAL}a_disk_that_hangs_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "actions come before the journal is on the disk",
        f"{JOURNAL}file.py",
        "    os.fdatasync(fd)\n\n\ndef _remove",
        "\n\ndef _remove",
        f"{TEST_JOURNAL}a_disk_that_hangs_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "a hung disk hangs the job",
        f"{JOURNAL}file.py",
        "if not write.wait(DISK_SECONDS):",
        "if not write.wait():",
        f"{TEST_JOURNAL}a_disk_that_hangs_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "two schedulers write one journal",
        f"{JOURNAL}file.py",
        "            if time.monotonic() > deadline:\n                raise",
        (
            "            if time.monotonic() > deadline:\n                return\n       "
            "         raise"
        ),
        f"{TEST_JOURNAL}a_journal_has_one_writer",
    ),
    Mutant(
        "the lock of a removed file is enough",
        f"{JOURNAL}file.py",
        "            if _is_same_file(path, os.fstat(fd)):\n                return fd",
        "            return fd",
        f"{TEST_JOURNAL}who_waits_for_the_lock_does_not_get_a_file_that_was_removed",
    ),
    Mutant(
        "another job's journal is removed",
        f"{JOURNAL}file.py",
        ("if _is_same_file(path, file):  # otherwise the name belongs to another job now"),
        "if True:",
        f"{TEST_JOURNAL}only_the_own_file_is_removed",
    ),
    Mutant(
        "the journal is readable for others",
        f"{JOURNAL}file.py",
        "os.fchmod(fd, 0o600)",
        "os.fchmod(fd, 0o644)",
        f"{TEST_JOURNAL}every_event_comes_back",
    ),
    Mutant(
        "the half-written end stays",
        f"{JOURNAL}file.py",
        "os.ftruncate(fd, parsed.good_bytes)",
        "pass",
        f"{TEST_JOURNAL}an_end_that_is_torn_at_any_byte_is_cut_off",
    ),
    Mutant(
        "a file of something else is overwritten",
        f"{JOURNAL}file.py",
        "if path.exists() and not is_blank(path):",
        "if False:",
        f"{TEST_JOURNAL}a_file_of_something_else_is_not_begun",
    ),
    Mutant(
        "a damaged payload is read",
        f"{JOURNAL}format.py",
        "if zlib.crc32(payload) != payload_crc:",
        "if False:",
        f"{TEST_JOURNAL}every_flipped_byte_is_damage_that_names_its_place",
    ),
    Mutant(
        "entries can be taken out",
        f"{JOURNAL}format.py",
        "if chain_crc != next_crc:",
        "if False:",
        f"{TEST_JOURNAL}every_flipped_byte_is_damage_that_names_its_place",
    ),
    Mutant(
        "a journal of another version counts as damaged",
        f"{JOURNAL}format.py",
        "if found := _FIRST_LINE.match(data):",
        "if found := None:",
        f"{TEST_JOURNAL}a_journal_of_another_version_is_not_called_damaged",
    ),
    Mutant(
        "a journal of another protocol is read",
        f"{JOURNAL}format.py",
        "if not data.startswith(MAGIC):",
        "if not data.startswith(MAGIC[:13]):",
        f"{TEST_JOURNAL}a_journal_of_another_version_is_not_called_damaged",
    ),
    Mutant(
        "an event of a later version counts as damage",
        f"{JOURNAL}format.py",
        "        return JournalEntry(time.group, time.now, codec.event_from_plain("
        'value["event"], "event"))\n'
        "    except codec.CodecError as error:\n"
        "        raise version_error(path, ",
        "        return JournalEntry(time.group, time.now, codec.event_from_plain("
        'value["event"], "event"))\n'
        "    except codec.CodecError as error:\n"
        "        raise damage_error(path, offset, ",
        f"{TEST_JOURNAL}a_complete_entry_that_is_not_known_is_of_another_version",
    ),
    Mutant(
        "a job that only runs writes its ticks",
        f"{JOURNAL}replay.py",
        "and machine.journal_events and not _is_status_only(machine)",
        "and machine.journal_events",
        f"{SUCCESSOR_TIME}a_tick_that_only_tells_who_is_missing_is_not_written",
    ),
    Mutant(
        "an event of the log is written twice",
        f"{JOURNAL}replay.py",
        "if (event.kind, _event_key(event)) not in there]",
        "]",
        f"{TEST_JOURNAL}what_was_decided_and_not_written_is_written_by_the_successor",
    ),
    Mutant(
        "an event of the log is lost with the predecessor",
        f"{JOURNAL}replay.py",
        "            if entry.group != newest:\n                sure",
        "            if True:\n                sure",
        f"{TEST_JOURNAL}what_was_decided_and_not_written_is_written_by_the_successor",
    ),
)
