"""
Launchers that give each task its numbers in variables: the MPIs, their relatives, torchrun, pdrun.

Values from tests/launcher/adapters/environments:

    Open MPI 4.1  OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4
                  OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4
                  OMPI_MCA_orte_hnp_uri=1909325824.0;tcp://192.0.2.2:40283;tcp6://[fd00::2]:40549
                  PMIX_NAMESPACE=1909325825
    Open MPI 5.0  the same, PRTE_LAUNCHED=1 PMIX_NAMESPACE=prterun-vm-25670@1
                  PMIX_SERVER_URI2=...;tcp4://127.0.0.1:55963
    MPICH 4, 5    HYDI_CONTROL_FD=7 PMI_FD=8 PMI_RANK=1 PMI_SIZE=4
                  MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4
    Intel MPI     I_MPI_HYDRA_UUID=a4640000-... HYDRA_BSTRAP_NODE_ID=0
                  PMI_FD=9 PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0
    PALS          PALS_APID PALS_RANKID PALS_NODEID PALS_LOCAL_RANKID PMI_SIZE PMI_LOCAL_SIZE
    jsrun         JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=4
                  JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=1
    Flux          FLUX_JOB_ID=ƒ58 FLUX_TASK_RANK=0 FLUX_JOB_SIZE=4
                  FLUX_TASK_LOCAL_ID=0 FLUX_JOB_NNODES=4

OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not a node rank, so it is not read. Local ranks
are read from the launcher and never computed: Open MPI 5 places rank 1 as local rank 2 when it
oversubscribes.
"""

from __future__ import annotations

import re

from pdrun.launcher.adapters.model import Probes
from pdrun.launcher.adapters.parsing import Environ, TaskVariables

OPENMPI_COMMANDS = (
    "orted",
    "mpirun",
    "mpiexec",
    "orterun",
    "mpirun.openmpi",
    "mpiexec.openmpi",
    "prted",
    "prterun",
    "prte",
)
INTEL_COMMANDS = ("mpiexec.hydra",)
HYDRA_COMMANDS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "mpiexec", "mpirun")
"""Command names of the ancestors of a task. The kernel keeps 15 characters."""


def _why_pmix_stale(environ: Environ, probes: Probes) -> str:
    """
    Require the daemon of this node: as an ancestor, or by an answer from its server.
    """
    if probes.is_under(OPENMPI_COMMANDS) is not False:
        return ""
    uri = environ.get("PMIX_SERVER_URI2", "")
    match = re.fullmatch(r"[^;]*;tcp4://([0-9.]{7,15}):([0-9]{1,5})", uri)
    if match is None or int(match[2]) > 65535:
        return ""
    host, port = match[1], int(match[2])
    if probes.accepts_connections(host, port):
        return ""
    return (
        "mpirun is not an ancestor of this process, and PMIX_SERVER_URI2"
        f" ({host}:{match[2]}) does not answer"
    )


def _why_hydra_stale(environ: Environ, probes: Probes) -> str:
    """
    Require an open PMI_FD, or the proxy as an ancestor: a shell or Python in between closes the
    descriptor.
    """
    text = environ.get("PMI_FD", "")
    if re.fullmatch(r"[0-9]{1,9}", text) and probes.is_open(int(text)):
        return ""
    if probes.is_under(HYDRA_COMMANDS) is not False:
        return ""
    return f"PMI_FD={text[:20]} is not open, and mpiexec is not an ancestor of this process"


def _find_openmpi_head(environ: Environ, probes: Probes) -> tuple[str, str]:
    """
    Return AzureML's node 0, or the host of mpirun from its URI (version 4) or namespace (5).
    """
    azure = environ.get("AZ_BATCH_MASTER_NODE", "")
    if match := re.fullmatch(r"([A-Za-z0-9._-]{1,253}):[0-9]{1,5}", azure):
        return match[1], "AZ_BATCH_MASTER_NODE"
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.match(r"[0-9.]+;tcp://([0-9.]{7,15})[,:]", uri):
        return match[1], "OMPI_MCA_orte_hnp_uri"
    if match := re.match(r"[0-9.]+;tcp6://\[([0-9a-fA-F:]{2,39})[],]", uri):
        return match[1], "OMPI_MCA_orte_hnp_uri"
    namespace = environ.get("PMIX_NAMESPACE", "")
    if match := re.fullmatch(r"prterun-([A-Za-z0-9._-]{1,253})-[0-9]+@[0-9]+", namespace):
        return match[1], "PMIX_NAMESPACE"
    return "", ""


def _find_hydra_head(environ: Environ, probes: Probes) -> tuple[str, str]:
    """Return the host of mpiexec, from the command line of the proxy above this process."""
    for command, option in (
        (HYDRA_COMMANDS[:1], "--control-port"),
        (HYDRA_COMMANDS[1:2], "--upstream-host"),
    ):
        host = probes.option_above(command, option)
        if option == "--control-port":
            host = host.rpartition(":")[0]
        if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host):
            return host, f"{option} of {command[0]}"
    return "", ""


def _find_intel_head(environ: Environ, probes: Probes) -> tuple[str, str]:
    """
    Return the host of mpiexec, also for Intel MPI 2021.19.

    There the proxy replaces the process whose command line has the host. Only its connection is
    left. Proxies form a tree with mpiexec as the root. The first ones, as many as the width of the
    tree, are connected to mpiexec directly.
    """
    host, source = _find_hydra_head(environ, probes)
    if host:
        return host, source
    if probes.is_under(INTEL_COMMANDS):
        return environ.get(
            "HYDRA_BSTRAP_LOCALHOST", ""
        ) or probes.hostname, f"{INTEL_COMMANDS[0]} above this process"
    names = ("HYDRA_BSTRAP_PROXY_ID", "HYDRA_BSTRAP_TREE_WIDTH", "HYDRA_BSTRAP_UPSTREAM_FD")
    texts = [environ.get(name, "") for name in names]
    if all(re.fullmatch("[0-9]{1,9}", text) for text in texts) and int(texts[0]) < int(texts[1]):
        return probes.peer_above(("hydra_pmi_proxy",), int(texts[2])), names[2]
    return "", ""


WORKER_LAUNCHERS = (
    TaskVariables(
        "pdrun",
        "a worker of pdrun",
        ("PDRUN_GENERATION", "RANK"),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        prefixes=("PDRUN_",),
    ),
    TaskVariables(
        "torchrun",
        "a worker of torchrun",
        ("TORCHELASTIC_RUN_ID", "RANK"),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        prefixes=("TORCHELASTIC_",),
        absent=("PDRUN_GENERATION",),
    ),
)
"""Launchers whose tasks are workers. A pdrun inside a worker starts a separate job."""

MPI_LAUNCHERS = (
    TaskVariables(
        "jsrun",
        "jsrun (IBM)",
        ("JSM_NAMESPACE_RANK",),
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        prefixes=("JSM_",),
    ),
    TaskVariables(
        "openmpi",
        "mpirun (Open MPI)",
        ("OMPI_COMM_WORLD_RANK",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
        find_head=_find_openmpi_head,
        why_stale=_why_pmix_stale,
        prefixes=("OMPI_", "PMIX_", "PRTE_"),
        absent=("JSM_NAMESPACE_RANK",),
    ),
    TaskVariables(
        "mvapich",
        "mpirun_rsh (MVAPICH)",
        ("MV2_COMM_WORLD_RANK",),
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        prefixes=("MV2_",),
    ),
    TaskVariables(
        "pals",
        "mpiexec (HPE PALS)",
        ("PALS_RANKID",),
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE",
        "PALS_NODEID",
        job="PALS_APID",
        prefixes=("PALS_",),
    ),
    TaskVariables(
        "intelmpi",
        "mpirun (Intel MPI)",
        ("PMI_RANK", "I_MPI_HYDRA_UUID"),
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        job="I_MPI_HYDRA_UUID",
        find_head=_find_intel_head,
        why_stale=_why_hydra_stale,
        prefixes=("I_MPI_HYDRA_", "HYDRA_", "PMI_", "MPI_LOCAL"),
        absent=("PALS_RANKID", "MV2_COMM_WORLD_RANK"),
    ),
    TaskVariables(
        "mpich",
        "mpiexec (MPICH)",
        ("PMI_RANK", "MPI_LOCALRANKID"),
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        find_head=_find_hydra_head,
        why_stale=_why_hydra_stale,
        prefixes=("HYDI_", "PMI_", "MPI_LOCAL"),
        absent=("I_MPI_HYDRA_UUID", "PALS_RANKID", "MV2_COMM_WORLD_RANK"),
    ),
    TaskVariables(
        "flux",
        "flux run",
        ("FLUX_TASK_RANK",),
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        nodes="FLUX_JOB_NNODES",
        job="FLUX_JOB_ID",
        prefixes=("FLUX_",),
    ),
    TaskVariables(
        "pmix",
        "a PMIx launcher",
        ("PMIX_RANK", "PMIX_NAMESPACE"),
        "PMIX_RANK",
        "",
        job="PMIX_NAMESPACE",
        why_stale=_why_pmix_stale,
        prefixes=("PMIX_", "PRTE_"),
        absent=("OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"),
    ),
)
"""
Innermost first. A step of srun with PMI or PMIx has some of these variables too, but belongs to
Slurm.
"""
