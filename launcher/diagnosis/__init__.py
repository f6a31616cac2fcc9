"""
Why a worker ended; whether it hangs; tracebacks and stacks as text. Pure, but for stack_collector.

May import: supervisor.events, common.
Start reading here: causes.py.
"""
