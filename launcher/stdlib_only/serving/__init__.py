"""
The worker of ``pdrun serve``, run by path: standard library only, nothing of pdrun.

May import: nothing.
Start reading here: server_prober.py.
"""
