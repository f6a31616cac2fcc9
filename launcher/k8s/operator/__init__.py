"""
An operator: jobs of pdrun as objects (PdJob), kept by a loop in the cluster.

    pdrun k8s operator manifest | kubectl apply -f -     crd.py: definition, roles, deployment
    pdrun k8s operator run                               loop.py, in the deployment's pod
    pdrun k8s submit --kind pdjob ...                    the object

The loop is level-based: on every event and every few seconds it reads a job and its pods,
and `reconcile` says what to write. Nothing depends on an event that was seen, so it may be killed
at any time. Start reading in `reconcile`.
"""
