"""
Facts in, LaunchPlan out. Pure, except facts.py and find_launchers.py.

May import: config, adapters, supervisor.events/boot/warm_client, hosts, common, backends.
Start reading here: plan.py, then model.py.
"""
