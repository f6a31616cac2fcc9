"""
Kubernetes: manifests of a job, and what becomes of it, through the user's own ``kubectl``.

    pdrun k8s render ... > job.yaml     options.py -> pod.py, overlay.py -> manifest.py
    pdrun k8s submit ...                manifest.py -> cluster.py -> kubectl apply
    pdrun k8s status | logs | stop      pods.py, logs.py

Manifests are data, made by pure functions: no module but `kubectl` runs a program. In the pods, the
adapters (`pdrun.launcher.adapters.kubernetes`) find each node's place.

Start reading in `manifest`. May import `config`, `translate` and what is below them.
"""
