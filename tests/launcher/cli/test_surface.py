"""
The surface is frozen on purpose: who changes one of these sets changes what users type, and says so
in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

import pdrun
from pdrun import errors, eventlog
from pdrun.launcher.cli.commands import LOADERS
from pdrun.launcher.cli.join import JOIN_OPTIONS
from pdrun.launcher.cli.run import run_command
from pdrun.launcher.config import resolve as derive
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.msrun_options import MSRUN_OPTIONS
from pdrun.launcher.config.options import OTHER_VARIABLES, Option
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.settings import Priority, Setting, Source
from pdrun.launcher.config.spec import list_field_paths
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS
from pdrun.rendezvous.protocol import messages
from pdrun.worker_env import WorkerEnv


def words(text: str) -> set[str]:
    return set(text.split())


OPTIONS = words("""
    -m --module --no-python --no_python --python --start --no-warm --env --chdir --nodes --devices --backend
    --threads --bind --local --scheduler --serve --no-serve --node-rank --node_rank --node-name --interface --job
    --token-file --insecure --start-timeout --grace --max-restarts --max_restarts --time-limit --log-dir --log_dir
    --log-name --no-files --show-ranks --prefix --screen --dry-run --explain --json --spares --servers --restart-window --restart-on
    --no-restart-on --backoff --gather --grow --on-scheduler-loss --hang-timeout --hosts --hostfile --include --exclude
    --launch-compat --local-rank-arg --show-stderr --rank-table --launcher --forward --ssh --ssh-opts --ship --mpirun --mpirun-opts --srun-opts
    --stdin --port-range --ssh-window
""")
TORCHRUNS = words("""
    --nnodes --nproc-per-node --nproc_per_node --master-addr --master_addr --master-port --master_port --rdzv-endpoint
    --rdzv_endpoint --rdzv-id --rdzv_id --rdzv-backend --rdzv_backend --rdzv-conf --rdzv_conf --standalone
    --monitor-interval --monitor_interval --start-method --start_method --role -r --redirects -t --tee
    --local-ranks-filter --local_ranks_filter --local-addr --local_addr --shutdown-timeout --shutdown_timeout
    --numa-binding --numa_binding --event-log-handler --event_log_handler --run-path --run_path --logs-specs
    --logs_specs --duplicate-stdout-filters --duplicate_stdout_filters --duplicate-stderr-filters
    --duplicate_stderr_filters --signals-to-handle --signals_to_handle --use-env --use_env --virtual-local-rank --virtual_local_rank
    --log-line-prefix-template --log_line_prefix_template --print-completion --print_completion
""")
MSRUNS = words("""
    --worker_num --local_worker_num --join --cluster_time_out --bind_core --bind_numa --worker_log_name
    --tail_worker_log --rank_table_file --sim_level --sim_rank_id
""")
COMMANDS = {
    "run",
    "serve",
    "join",
    "scheduler",
    "relay",
    "status",
    "logs",
    "top",
    "attach",
    "trace",
    "report",
    "plot",
    "export",
    "stop",
    "warm",
    "token",
    "env",
    "translate",
    "rank-table",
    "plan",
    "doctor",
    "slurm",
    "k8s",
    "mpirun",
    "checkpoint",
    "completion",
}
VARIABLES = words("""
    PDRUN_MODULE PDRUN_NO_PYTHON PDRUN_PYTHON PDRUN_CHDIR PDRUN_NODES PDRUN_DEVICES PDRUN_BACKEND PDRUN_THREADS
    PDRUN_BIND PDRUN_LOCAL PDRUN_SCHEDULER PDRUN_SERVE PDRUN_NODE_RANK PDRUN_NODE_NAME PDRUN_INTERFACE PDRUN_JOB
    PDRUN_TOKEN_FILE PDRUN_START_TIMEOUT PDRUN_GRACE PDRUN_MAX_RESTARTS PDRUN_TIME_LIMIT PDRUN_LOG_DIR PDRUN_LOG_NAME
    PDRUN_NO_FILES PDRUN_SHOW_RANKS PDRUN_PREFIX PDRUN_SCREEN PDRUN_START PDRUN_SPARES PDRUN_RESTART_WINDOW PDRUN_RESTART_ON
    PDRUN_NO_RESTART_ON PDRUN_BACKOFF PDRUN_GATHER PDRUN_GROW PDRUN_ON_SCHEDULER_LOSS PDRUN_HANG_TIMEOUT PDRUN_NO_WARM
    PDRUN_HOSTS PDRUN_HOSTFILE PDRUN_INCLUDE PDRUN_EXCLUDE PDRUN_RANK_TABLE PDRUN_LAUNCHER PDRUN_FORWARD PDRUN_SSH
    PDRUN_LAUNCH_COMPAT PDRUN_LOCAL_RANK_ARG PDRUN_SHOW_STDERR
    PDRUN_SSH_OPTS PDRUN_SHIP PDRUN_MPIRUN PDRUN_MPIRUN_OPTS PDRUN_SRUN_OPTS PDRUN_STDIN PDRUN_SERVERS PDRUN_PORT_RANGE PDRUN_SSH_WINDOW
""")
PUBLIC = words("""
    Auto Balance BestCheckpoint EarlyStop Fp8 MovingAverage StepReport PlanReport plan_of ConfigError Context ContextParallel Cut DeadlineExceeded JobFailed KVCache L Layout Loader MoE Offload OpLayout Operators PdrunError
    PeerLost Pipeline Precision RendezvousError Run ServedEmbedding Servers Strategy UsageError WorkerEnv __version__ breakpoint col constrain
    cross_entropy dense elastic empty_init experts fuse_head_loss heads infer init launch linear_cross_entropy mesh parallelize positions progress replicate row rows seq servers shard
    strategy_for vocab
""")
MESSAGES = words("""
    Hello Welcome Join Waiting Refuse Assign Ready Unready Start WorkerExit Finished StopWorkers Verdict Heartbeat Echo
    Leave Standby Depart Progress Hung ShowStacks Stacks Notice StopRequest StatusQuery StatusReply
""")
WORKER_VARIABLES = words("""
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK ROLE_NAME ROLE_RANK
    ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
    TORCHELASTIC_USE_AGENT_STORE RANK_ID RANK_SIZE DEVICE_ID PDRUN_JOB PDRUN_NODE PDRUN_GENERATION PDRUN_DEVICE_KIND
    PDRUN_COLLECTIVE
""")
FIELDS = words("""
    output.show_stderr program.local_rank_arg program.kind program.target program.args program.python program.start program.warm program.stdin program.prober program.is_per_node resources.nodes
    resources.devices resources.min_nodes resources.spares resources.servers resources.indices
    resources.backend resources.threads resources.bind policy.start_timeout policy.grace policy.max_restarts
    policy.restart_window policy.restart_on policy.no_restart_on policy.backoff policy.gather policy.grow
    policy.scheduler_loss policy.hang_timeout
    policy.time_limit output.log_dir output.show_ranks output.prefix output.screen output.files output.log_name
    place.scheduler place.store place.node_rank place.node_name place.local
    place.hosts place.node_names place.rank_table place.launcher
    reach.ssh reach.ssh_opts reach.forward reach.ship reach.mpirun reach.mpirun_opts reach.srun_opts
    place.simulated place.interface place.port_range reach.ssh_window place.serve place.token_file place.insecure job env
    chdir
""")
EVENTS = words("""
    created joined refused assigned started exited stopping restarting suspect recovered lost left warning verdict
    standby gathering progress usage plan hang resumed
""")


def spellings(rows: tuple[Option, ...]) -> set[str]:
    return {name for row in rows for name in row.names}


def test_options_of_run() -> None:
    assert spellings(RUN_OPTIONS) == OPTIONS
    assert spellings(TORCHRUN_OPTIONS) == TORCHRUNS
    assert spellings(MSRUN_OPTIONS) == MSRUNS


def test_no_spelling_means_two_things() -> None:
    every = [name for row in (*RUN_OPTIONS, *ALIAS_OPTIONS) for name in row.names]
    twins = [name for row in (*RUN_OPTIONS, *ALIAS_OPTIONS) for name in row.env]
    assert len(every) == len(set(every))
    assert len(twins) == len(set(twins))


def test_commands() -> None:
    assert set(LOADERS) == COMMANDS
    for name, load in LOADERS.items():
        assert load().name == name
    spellings = {name for param in run_command().params for name in param.opts if name[0] == "-"}
    assert spellings == OPTIONS | TORCHRUNS | MSRUNS
    assert set(JOIN_OPTIONS) < OPTIONS


def test_variables() -> None:
    assert {
        name for row in RUN_OPTIONS for name in row.env if name.startswith("PDRUN_")
    } == VARIABLES
    assert not VARIABLES & set(OTHER_VARIABLES)


def test_public_names() -> None:
    assert set(pdrun.__all__) == PUBLIC


@pytest.mark.torch
def test_cut_is_the_former_name_of_op_layout() -> None:
    assert pdrun.Cut is pdrun.OpLayout


def test_wire_messages() -> None:
    assert {kind.__name__ for kind in get_args(messages.Message)} == MESSAGES
    assert messages.PROTOCOL == 3


def test_worker_environment() -> None:
    env = WorkerEnv(0, 1, 0, 1, 0, 1, "127.0.0.1", 1, "run")
    assert set(env.to_env()) == WORKER_VARIABLES
    told = dataclasses.replace(env, agreed_step=3, agent="/run/agent", run="demo-1").to_env()
    assert set(told) == WORKER_VARIABLES | {"PDRUN_AGREED_STEP", "PDRUN_AGENT", "PDRUN_RUN"}


def test_fields_of_a_job() -> None:
    assert set(list_field_paths()) == FIELDS


def test_events() -> None:
    assert set(eventlog.EVENT_KINDS) == EVENTS


def test_exit_codes() -> None:
    codes = {kind.__name__: kind.exit_code for kind in errors.PdrunError.__subclasses__()}
    assert codes == {
        "UsageError": 2,
        "ConfigError": 78,
        "RendezvousError": 69,
        "AuthenticationError": 77,
        "DeadlineExceeded": 124,
        "JobFailed": 70,
        "PeerLost": 69,
    }


def test_every_path_that_an_option_gives_is_known() -> None:
    known = {
        *list_field_paths(),
        "scheduler.host",
        "store.host",
        "store.port",
        "scheduler.port",
        "msrun.workers",
        "msrun.local_workers",
        "msrun.bind_core",
        "msrun.bind_numa",
        "torchrun.redirects",
        "torchrun.tee",
        "torchrun.shown",
        "torchrun.standalone",
        "torchrun.grow",
        "torchrun.launch_compat",
        "torchrun.use_env",
        "torchrun.any_port",
        "torchrun.gather",
        "hosts.all",
        "hosts.file",
        "hosts.include",
        "hosts.exclude",
        "ask.dry_run",
        "ask.explain",
        "ask.json",
    }
    texts = (
        "1",
        "1s",
        "h:1",
        "True",
        "cores",
        "cpu",
        "node",
        "rank",
        "A=1",
        "1:2",
        "join_timeout=3",
        "last_call_timeout=3",
        "null",
        "c10d",
    )
    for row in (*RUN_OPTIONS, *ALIAS_OPTIONS):
        for text in texts:
            try:
                found = row.read(text, row.names[0])
            except errors.UsageError:
                continue
            assert {path for path in found if not path.startswith("env.")} <= known, row.names


def test_every_parameter_of_a_row_is_used() -> None:
    assert {field.name for field in dataclasses.fields(Option)} == {
        "names",
        "help",
        "read",
        "group",
        "metavar",
        "env",
        "off_values",
        "origin",
        "same_as",
        "note",
        "is_in_short_help",
    }
    program = Setting("program.target", "x", Source("command line", Priority.COMMAND))
    assert derive.resolve_spec([program]).spec.program.target == "x"


def test_launchers_that_are_read() -> None:
    from pdrun.launcher.adapters.detect import ADAPTERS
    from pdrun.launcher.ranktables.model import DIALECTS

    assert " ".join(row.name for row in ADAPTERS) == (
        "pdrun torchrun jsrun openmpi mvapich pals intelmpi mpich flux pmix slurm-step pet mindspore volcano"
        " pytorch-operator jobset indexed-job sagemaker azureml vertex determined openpai tpu lws skypilot dstack aws-batch"
        " volcengine beaker metaflow ngc paddle variables ascend slurm-job oar cobalt loadleveler pbs lsf sge mpi-operator"
    )
    assert DIALECTS == ("1.0", "1.1", "1.2", "2.0", "group", "lab")
