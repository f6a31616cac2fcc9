"""
A Kubernetes for tests on loopback: a real etcd, API server and controller manager, a real kubectl.

    server     starts and stops them                       (scripts/kube makes the programs)
    api        requests to the API server
    kubelet    runs each pod's first container as a process of this machine, serves its log
    indexed    makes the pods of indexed Jobs: the server (1.20) does not know them yet
"""
