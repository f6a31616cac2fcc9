"""
Why a worker ended; whether it hangs; tracebacks and stacks as text. What workers
use. Pure, but for stack_collector and usage.

May import: supervisor.events, common.
Start reading here: causes.py.
"""
