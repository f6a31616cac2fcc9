"""
`pdrun doctor`: what on a machine, and between nodes, would break or slow down a job.

    finding.py            a finding: what, where, what to do
    runner.py             all checks of a machine at the same time, bounded
    system_checks.py      limits, memory, disks, clock, quota
    device_checks.py      driver, torch build, device processes, errors, throttling
    variable_checks.py    variables that contradict each other or the machine
    job_checks.py         versions, jobs and workers that are left over
    node_checks.py        what nodes have measured between each other -> findings

May import: jobs, adapters, hosts, common, backends. Start reading in `runner`.
"""
