"""
What an administrator applies once: definition of PdJob, roles, the operator's deployment.

    spec.nodes                pods of the job now; `kubectl scale` changes it
    spec.minNodes, maxNodes   range of an elastic job; both are nodes if they are not given
    spec.image                of every pod
    spec.run                  options of `pdrun run`, script and arguments
    spec.pod                  merged into the pods, as `pdrun k8s submit --pod`
    spec.secret               a Secret with the key `token`; one is made if it is not given
    spec.scheduler            claim and path of the journal of a scheduler in a separate pod
    spec.suspend              true: no pods
    spec.ttlSeconds           the job is deleted so long after its end
"""

from __future__ import annotations

from pdrun.launcher.k8s.manifest import API_VERSION, KIND
from pdrun.launcher.k8s.pod import Manifest

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "pdjobs"
STATES = ("Invalid", "Suspended", "Pending", "Running", "Succeeded", "Failed")
MAX_NODES = 16_384
OPERATOR_NAME = "pdrun-operator"


def make_definition() -> Manifest:
    """Return the CustomResourceDefinition."""
    count = {"type": "integer", "minimum": 1, "maximum": MAX_NODES}
    text = {"type": "string"}
    spec = {
        "type": "object",
        "required": ["image", "run"],
        "properties": {
            "nodes": {**count, "default": 1},
            "minNodes": count,
            "maxNodes": count,
            "image": {"type": "string", "minLength": 1, "maxLength": 512},
            "run": {"type": "array", "minItems": 1, "maxItems": 4096, "items": text},
            "pod": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "secret": {"type": "string", "maxLength": 253},
            "scheduler": {
                "type": "object",
                "required": ["claim", "path"],
                "properties": {
                    "claim": {"type": "string", "minLength": 1, "maxLength": 253},
                    "path": {"type": "string", "pattern": "^/", "maxLength": 4096},
                },
            },
            "suspend": {"type": "boolean", "default": False},
            "ttlSeconds": {"type": "integer", "minimum": 0},
        },
    }
    status = {
        "type": "object",
        "properties": {
            "state": {"type": "string", "enum": list(STATES)},
            "nodes": {"type": "integer"},
            "code": {"type": "integer"},
            "reason": text,
            "lostPods": {"type": "integer"},
            "lostSchedulers": {"type": "integer"},
            "startTime": {"type": "string", "format": "date-time"},
            "endTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer"},
        },
    }
    columns = [
        ("State", "string", ".status.state"),
        ("Nodes", "integer", ".status.nodes"),
        ("Wanted", "integer", ".spec.nodes"),
        ("Code", "integer", ".status.code"),
        ("Age", "date", ".metadata.creationTimestamp"),
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {"spec": spec, "status": status},
            }
        },
        "subresources": {
            "status": {},
            "scale": {"specReplicasPath": ".spec.nodes", "statusReplicasPath": ".status.nodes"},
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"plural": PLURAL, "singular": "pdjob", "kind": KIND, "shortNames": ["pdj"]},
            "versions": [version],
        },
    }


def make_roles(namespace: str) -> list[Manifest]:
    """
    Return the operator's account and role, and a role for users, all in one namespace.

    The operator cannot read Secrets of others by listing: it gets those whose name it knows. Users
    create jobs and read pods and logs, and no Secrets.
    """
    operator_rules = [
        _rule([GROUP], [PLURAL], ["get", "list", "watch", "delete"]),
        _rule([GROUP], [f"{PLURAL}/status"], ["get", "patch"]),
        _rule([""], ["pods"], ["get", "list", "watch", "create", "patch", "delete"]),
        _rule([""], ["services", "secrets"], ["get", "create", "patch"]),
        _rule(["coordination.k8s.io"], ["leases"], ["get", "create", "update"]),
    ]
    user_rules = [
        _rule([GROUP], [PLURAL], ["get", "list", "watch", "create", "patch", "update", "delete"]),
        _rule([GROUP], [f"{PLURAL}/scale"], ["get", "patch", "update"]),
        _rule([""], ["pods", "pods/log"], ["get", "list", "watch"]),
    ]
    place = {"namespace": namespace}
    account = {"kind": "ServiceAccount", "name": OPERATOR_NAME, **place}
    rbac = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": OPERATOR_NAME, **place},
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": {"name": OPERATOR_NAME, **place},
            "rules": operator_rules,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": OPERATOR_NAME, **place},
            "subjects": [account],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": OPERATOR_NAME},
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": {"name": "pdrun-user", **place},
            "rules": user_rules,
        },
    ]


def _rule(groups: list[str], resources: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs}


def make_deployment(namespace: str, image: str) -> Manifest:
    """Return the deployment of the operator; two replicas may overlap, the lease decides."""
    labels = {"app.kubernetes.io/name": OPERATOR_NAME}
    container = {
        "name": "operator",
        "image": image,
        "command": ["pdrun", "k8s", "operator", "run", "--namespace", namespace],
        "resources": {
            "requests": {"cpu": "50m", "memory": "96Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": OPERATOR_NAME, "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "serviceAccountName": OPERATOR_NAME,
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 65_532,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                },
            },
        },
    }
