"""
Command lines of other launchers, written as pdrun's own: torchrun, torch.distributed.launch, msrun,
accelerate, deepspeed, horovodrun, mpirun, colossalai. It reads the host and configuration files
that a command line names, and starts nothing.

May import: config, hosts, common.
Start reading here: command_line.py.
"""
