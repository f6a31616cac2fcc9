"""Fast start: fork server, warm process, start method. The hazards of a fork, and of old state."""

from __future__ import annotations

from tests.mutants.model import Mutant

HERE = "tests/launcher/stdlib_only/"
HAZARDS = f"{HERE}test_fork_hazards.py::test_"
SAME = f"{HERE}test_forked_equals_executed.py::test_"
DECISION = "tests/launcher/plan/test_start_method.py::test_"
WARM = f"{HERE}test_warm_command.py::test_"
PROCESS = f"{HERE}test_warm_process.py::test_"


MUTANTS = (
    # threads
    Mutant(
        "threads in the parent",
        "launcher/stdlib_only/fork_server.py",
        "    if count != 1:",
        "    if False:",
        f"{HAZARDS}an_unfit_starter_costs_speed_only",
    ),
    Mutant(
        "threads that come after the import",
        "launcher/stdlib_only/fork_server.py",
        "            why = why_not_forkable()\n            if why:\n                self.send",
        "            why = ''\n            if why:\n                self.send",
        f"{HAZARDS}threads_that_come_later_are_seen_at_the_fork",
    ),
    Mutant(
        "the import makes a pool",
        "launcher/stdlib_only/import_env.py",
        'return {**environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS":'
        ' "1"}',
        "return dict(environ)",
        f"{DECISION}the_import_runs_with_one_thread",
    ),
    Mutant(
        "thread counts are read at import",
        "launcher/stdlib_only/forked_worker.py",
        "            torch.set_num_threads(wanted)",
        "            pass",
        f"{HAZARDS}thread_counts_are_the_workers_own[cold-3]",
    ),
    Mutant(
        "OpenBLAS's threads are fixed at import",
        "launcher/stdlib_only/forked_worker.py",
        "        set_openblas_threads(blas)",
        "        pass",
        f"{HAZARDS}thread_counts_are_the_workers_own[cold-3]",
    ),
    Mutant(
        "affinity after threads",
        "launcher/stdlib_only/fork_server.py",
        '                os.sched_setaffinity(0, command["cpus"])',
        "                pass",
        f"{HAZARDS}affinity_is_set_before_any_thread[cold]",
    ),
    # random state
    Mutant(
        "random state of torch",
        "launcher/stdlib_only/forked_worker.py",
        "torch.default_generator.seed()",
        "pass",
        f"{HAZARDS}random_state_is_fresh_in_every_worker[cold]",
    ),
    Mutant(
        "random state of numpy",
        "launcher/stdlib_only/forked_worker.py",
        'modules["numpy.random"].seed(None)',
        "pass",
        f"{HAZARDS}numbers_drawn_by_an_import_are_drawn_by_nobody_else",
    ),
    Mutant(
        "multiprocessing's key",
        "launcher/stdlib_only/forked_worker.py",
        'process._current_process._config["authkey"] ='
        " process.AuthenticationString(os.urandom(32))",
        "pass",
        f"{HAZARDS}random_state_is_fresh_in_every_worker[cold]",
    ),
    # what is read at import or first use
    Mutant(
        "an operator before the fork fixes the ISA",
        "launcher/stdlib_only/fork_server.py",
        "    finally:\n        gc.enable()\n",
        "    finally:\n        gc.enable()\n    sys.modules['torch'].ones(64).add(1)\n",
        f"{HAZARDS}isa_choice_is_read_in_the_worker[cold]",
    ),
    Mutant(
        "variables that come too late go unnoticed",
        "launcher/stdlib_only/fork_server.py",
        "    late_variables.watch_imports()\n",
        "",
        f"{HAZARDS}late_variables_are_named_if_they_change_something[cold]",
    ),
    Mutant(
        "variables set above the import of torch",
        "launcher/plan/start_method.py",
        "    if facts.late_variable:",
        "    if False:",
        f"{DECISION}auto_uses_exec_if_a_fork_is_unsafe_or_useless",
    ),
    Mutant(
        "tools that count when a process starts",
        "launcher/plan/start_method.py",
        "    return import_env.why_exec_needed(dict(environ))",
        '    return ""',
        f"{DECISION}variables_read_at_process_start_require_exec",
    ),
    Mutant(
        "values that differ between workers",
        "launcher/plan/start_method.py",
        "    if different:",
        "    if False:",
        f"{DECISION}only_variables_that_are_read_at_first_use_may_differ_between_workers",
    ),
    Mutant(
        "C keeps the starter's environment",
        "launcher/stdlib_only/forked_worker.py",
        "    ctypes.CDLL(None).clearenv()\n    os.environb.update(wanted)",
        "    dict.update(os.environb._data, wanted)",
        f"{HAZARDS}environment_is_exact_for_python_and_for_c[cold]",
    ),
    Mutant(
        "variables that the import sets",
        "launcher/stdlib_only/fork_server.py",
        "                os.environb[name] = value",
        "                pass",
        f"{SAME}the_process_itself[warm]",
    ),
    # devices
    Mutant(
        "a device is open",
        "launcher/stdlib_only/fork_server.py",
        'if path.startswith("/dev/") and',
        "if False and",
        f"{HAZARDS}an_unfit_starter_costs_speed_only",
    ),
    Mutant(
        "an accelerator was initialised",
        "launcher/stdlib_only/fork_server.py",
        'if getattr(device, "is_initialized", bool)() or',
        "if False and",
        f"{HAZARDS}an_unfit_starter_costs_speed_only",
    ),
    # what a program sees of itself
    Mutant(
        "__main__ is the starter's",
        "launcher/stdlib_only/forked_worker.py",
        '    sys.modules["__main__"] = main\n',
        "",
        f"{SAME}the_process_itself[cold]",
    ),
    Mutant(
        "__builtins__ is a dict",
        "launcher/stdlib_only/forked_worker.py",
        '__builtins__=sys.modules["builtins"])',
        "__builtins__=vars(sys.modules['builtins']))",
        f"{SAME}the_process_itself[cold]",
    ),
    Mutant(
        "a frame of the starter in tracebacks",
        "launcher/stdlib_only/fork_server.py",
        "        forked_worker.hide_own_frame()\n",
        "",
        f"{SAME}exceptions_in_modules_have_the_same_traceback[cold]",
    ),
    Mutant(
        "the command line is the starter's",
        "launcher/stdlib_only/forked_worker.py",
        "    if 0 < len(text) <= end - start:",
        "    if False:",
        f"{SAME}the_process_itself[cold]",
    ),
    Mutant(
        "a late thread cannot pickle",
        "launcher/stdlib_only/forked_worker.py",
        '    main = types.ModuleType("__main__")',
        '    main = types.ModuleType("__mp__")',
        f"{SAME}the_process_itself[cold]",
    ),
    Mutant(
        "descriptors of a neighbour",
        "launcher/stdlib_only/fork_server.py",
        "                if other is not request:\n                    other.close()",
        "                pass",
        f"{HAZARDS}no_descriptor_of_a_neighbour_that_is_forked_with_it",
    ),
    # output and leaving
    Mutant(
        "buffers are printed once a worker",
        "launcher/stdlib_only/fork_server.py",
        "    sys.stdout.flush()\n    sys.stderr.flush()\n",
        "",
        f"{HAZARDS}the_starters_buffers_are_not_printed_by_workers",
    ),
    Mutant(
        "the starter's streams",
        "launcher/stdlib_only/fork_server.py",
        "        forked_worker.reopen_streams()\n",
        "",
        f"{SAME}unbuffered_and_stdin[cold]",
    ),
    Mutant(
        "files that nobody closed",
        "launcher/stdlib_only/fast_exit.py",
        "                        thing.flush()",
        "                        pass",
        f"{SAME}leaving_keeps_files_threads_handlers_and_destructors[cold]",
    ),
    Mutant(
        "C's buffers",
        "launcher/stdlib_only/fast_exit.py",
        '        libc["__cxa_atexit"](ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)\n',
        "",
        f"{SAME}exit_code_survives_the_short_way_out[cold]",
    ),
    Mutant(
        "memory is not shared",
        "launcher/stdlib_only/fast_exit.py",
        "        gc.freeze()\n",
        "",
        f"{HAZARDS}parallel_regions_and_autograd_work[cold]",
    ),
    # whose child a worker is
    Mutant(
        "workers are the starter's children",
        "launcher/stdlib_only/fork_server.py",
        '            if os.getppid() != request.facts["keeper"]:\n                os._exit(127)',
        "            pass\n            os.setsid if 0 else os.abort()",
        f"{HAZARDS}workers_are_the_keepers_children_and_their_status_is_exact[cold]",
    ),
    Mutant(
        "leftovers have no owner",
        "launcher/stdlib_only/forked_worker.py",
        "        ctypes.memmove(first + at.start(1), value, len(value))",
        "        pass",
        f"{HAZARDS}leftovers_of_one_worker_are_swept_and_not_its_neighbours[cold]",
    ),
    # warm
    Mutant(
        "limits and priority of another shell",
        "launcher/stdlib_only/warm_server.py",
        "            why = self.inherited_state.adopt_state(wanted)",
        '            why = ""',
        f"{PROCESS}what_was_inherited_is_taken_on_or_refused",
    ),
    Mutant(
        "another user asks",
        "launcher/stdlib_only/warm_server.py",
        "if user != os.geteuid() or len",
        "if len",
        f"{PROCESS}another_user_is_not_answered_and_not_asked",
    ),
    Mutant(
        "another user answers",
        "launcher/supervisor/warm_client.py",
        "        if user != os.geteuid():",
        "        if False:",
        f"{PROCESS}another_user_is_not_answered_and_not_asked",
    ),
    Mutant(
        "others can write into the folder",
        "launcher/supervisor/warm_client.py",
        "if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:",
        "if False:",
        f"{PROCESS}another_user_is_not_answered_and_not_asked",
    ),
    Mutant(
        "a module was changed",
        "launcher/stdlib_only/import_tracker.py",
        "            if _stamp_file(path) != stamp:\n                return path",
        "            pass",
        f"{PROCESS}files_and_variables_of_the_import_are_known",
    ),
    Mutant(
        "another module would be found",
        "launcher/stdlib_only/import_tracker.py",
        "                if found != entries:",
        "                if False:",
        f"{PROCESS}files_and_variables_of_the_import_are_known",
    ),
    Mutant(
        "a variable that was looked up",
        "launcher/stdlib_only/import_tracker.py",
        '            self.names.add(os.fsdecode(key) if isinstance(key, (str, bytes)) else "")',
        "            pass",
        f"{PROCESS}files_and_variables_of_the_import_are_known",
    ),
    Mutant(
        "a variable has another value",
        "launcher/plan/start_method.py",
        "if job_env.get(name) != warm.variables.get(name) and",
        "if False and",
        f"{WARM}what_fits_a_job",
    ),
    Mutant(
        "a stopped keeper sleeps on",
        "launcher/stdlib_only/watchdog.py",
        "                os.kill(parent, signal.SIGCONT)",
        "                pass",
        f"{PROCESS}a_stopped_keeper_wakes_when_its_agent_is_gone",
    ),
    Mutant(
        "orphans of a killed keeper",
        "launcher/stdlib_only/warm_server.py",
        "        self.kill_orphans()\n",
        "",
        f"{PROCESS}what_hides_from_its_mark_is_ended_by_the_warm_process",
    ),
    Mutant(
        "idle during a job",
        "launcher/stdlib_only/warm_server.py",
        "            if not self.supervisors and now",
        "            if now",
        f"{PROCESS}it_ends_when_nobody_has_used_it_and_not_during_a_job",
    ),
    Mutant(
        "descriptors of the shell",
        "launcher/supervisor/warm_start.py",
        "        os.closerange(last + 1, 1 << 20)\n",
        "",
        f"{PROCESS}descriptors_of_whoever_started_it_are_closed",
    ),
)
