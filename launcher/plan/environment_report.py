"""The report of ``pdrun env``: versions, addresses, CPUs, backends, variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.plan.environment import display_value, is_launcher_variable
from pdrun.launcher.plan.model import Facts

VARIABLE_FAMILIES = (
    ("pdrun", r"PDRUN_"),
    ("torchrun's options", r"PET_"),
    (
        "torchrun's workers",
        r"TORCHELASTIC_|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)$|ROLE_NAME$|NODE_RANK$"
        r"|MASTER_(?:ADDR|PORT)$",
    ),
    ("MindSpore, Ascend", r"MS_|MSRUN_|RANK_(?:ID|SIZE|TABLE_FILE)$|DEVICE_ID$|ASCEND_"),
    ("Open MPI, PRRTE, MVAPICH", r"OMPI_|PRTE_|MV2_"),
    ("PMI, PMIx, MPICH, Intel MPI", r"PMI2?_|PMIX_|HYDRA_|HYDI_|I_MPI_|MPI_LOCAL"),
    ("Slurm", r"SLURM_"),
    ("PBS, LSF, SGE, Flux, PALS", r"PBS_|LSB_|LSF_|JSM_|PE_HOSTFILE$|SGE_|NSLOTS$|FLUX_|PALS_"),
    (
        "Kubernetes",
        r"KUBERNETES_SERVICE_HOST$|JOB_(?:COMPLETION_)?INDEX$|REPLICATED_JOB_|GLOBAL_REPLICAS$"
        r"|PODS_PER_JOB$|V[CK]_|K_MPI_",
    ),
    (
        "SageMaker, AzureML, Vertex AI, TPU",
        r"SM_|TRAINING_JOB_NAME$|AZUREML_|AZ_BATCH|CLUSTER_SPEC$|TF_CONFIG$|CLOUD_ML_|TPU_"
        r"|MEGASCALE_",
    ),
    ("device visibility", r"(?:CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES$|ZE_AFFINITY_MASK$"),
    ("threads", r"(?:OMP|MKL|OPENBLAS|KMP)_"),
)
"""
Title and pattern of the variables of each launcher or library. The first match counts.
"""


def group_variables(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the set variables of launchers and schedulers, grouped by family."""
    found: dict[str, list[str]] = {}
    for family, pattern in VARIABLE_FAMILIES:
        taken = {name for names in found.values() for name in names}
        names = [name for name in sorted(environ) if name not in taken and re.match(pattern, name)]
        if names:
            found[family] = names
    return found


def format_environment(facts: Facts, chosen: str) -> str:
    """
    Return the report of ``pdrun env`` as text.

    Args:
        chosen: the backend and the number of workers that a job on this machine gets.
    """
    cpus = facts.cpus
    quota = "no limit"
    if cpus.quota is not None:
        quota = f"limited to {cpus.quota:g} by the cgroup"
    cores = len(cpus.cores) or "unknown"
    numa_nodes = len(cpus.numa) or "unknown"
    lines = [
        f"pdrun      {facts.pdrun_version}",
        f"python     {facts.python_version} ({facts.python})",
        f"torch      {facts.torch_version or 'not installed for this python'}",
        f"host       {facts.hostname}, user id {facts.uid}",
        f"addresses  {', '.join(f'{address} ({name})' for name, address in facts.addresses)}",
        f"route      {facts.route_address or 'none to other machines'}",
        f"cpus       {format_ranks(cpus.cpus)}: {cpus.usable_cpus} usable, {quota}",
        f"topology   {cores} core(s), {numa_nodes} memory node(s)",
        f"use        {chosen}",
        "",
        "backends:",
    ]
    for backend in facts.backends:
        state = "refused"
        if backend.present:
            state = f"{len(backend.devices)} device(s)"
        lines.append(f"  {backend.name:<5} {state}: {backend.reason}")
    lines += ["", "environment:"]
    for family, names in group_variables(facts.environ).items():
        lines.append(f"  {family}")
        for name in names:
            line = f"    {name}={display_value(name, facts.environ[name])}"
            if is_launcher_variable(name):
                line += "   (not passed on to workers)"
            lines.append(line)
    if lines[-1] == "environment:":
        lines.append("  no variable of any launcher or scheduler is set")
    return "\n".join(lines) + "\n"
