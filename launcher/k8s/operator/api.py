"""
Requests to the API server by the standard library: the operator needs seven of them.

In a pod, the account's token and the cluster's certificate are files. Elsewhere ``kubectl proxy``
passes requests on with the user's own login.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, PdrunError, RendezvousError
from pdrun.launcher.k8s.manifest import API_VERSION, KIND
from pdrun.launcher.k8s.operator.crd import PLURAL
from pdrun.launcher.k8s.pod import Manifest

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 20.0
WATCH_SECONDS = 240
"""The server ends a watch after this time; it is then begun again."""
PROXY_START_SECONDS = 20.0
PATHS: Mapping[str, str] = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    KIND: f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}",
}


class RefusedError(RendezvousError):
    """The API server refused a request."""

    def __init__(self, code: int, reason: str, where: str) -> None:
        super().__init__(f"{reason} ({code})", where=where)
        self.code = code


class KubernetesApi:
    """
    The objects of one namespace.

    Raises:
        RefusedError: a method's request was refused.
        RendezvousError: the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        token_file: Path | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.namespace = namespace
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._context = context

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None: it does not exist."""
        try:
            return self._request("GET", kind, name)
        except RefusedError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "") -> list[Manifest]:
        """Return all objects of a kind, or those with a label."""
        query = f"labelSelector={urllib.parse.quote(selector)}" if selector else ""
        items = self._request("GET", kind, "", query=query).get("items") or []
        return [{"apiVersion": "", "kind": kind, **item} for item in items]

    def create(self, body: Manifest) -> bool:
        """Create an object; return whether it did not exist."""
        try:
            self._request("POST", str(body["kind"]), "", body)
        except RefusedError as error:
            if error.code == 409:
                return False
            raise
        return True

    def replace(self, body: Manifest) -> bool:
        """Replace an object; return False if it has changed since it was read."""
        try:
            self._request("PUT", str(body["kind"]), str(body["metadata"]["name"]), body)
        except RefusedError as error:
            if error.code == 409:
                return False
            raise
        return True

    def delete(self, kind: str, name: str, uid: str = "") -> None:
        """Delete an object if it exists and has the uid."""
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._request("DELETE", kind, name, body)
        except RefusedError as error:
            if error.code not in (404, 409):
                raise

    def patch_status(
        self, kind: str, name: str, status: Mapping[str, Any], version: str = ""
    ) -> bool:
        """
        Merge into the status of an object, if it exists.

        Args:
            kind: of the object.
            name: of the object.
            status: fields; None removes one.
            version: the resourceVersion from which the status was derived; empty: any.

        Returns:
            False if the object is another version by now: nothing was written.
        """
        body: Manifest = {"status": dict(status)}
        if version:
            body["metadata"] = {"resourceVersion": version}
        try:
            self._request("PATCH", kind, f"{name}/status", body)
        except RefusedError as error:
            if error.code == 409 and version:
                return False
            if error.code != 404:
                raise
        return True

    def watch(self, kind: str) -> Iterator[Manifest]:
        """
        Yield the object of every change from now on; ends when the server ends it.

        Changes between two watches are missed: the caller lists in between.
        """
        query = f"watch=1&timeoutSeconds={WATCH_SECONDS}"
        with self._open("GET", kind, "", None, query, WATCH_SECONDS + REQUEST_SECONDS) as answer:
            for line in answer:
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    return
                found = event.get("object")
                if isinstance(found, dict):
                    yield found

    def _request(
        self, method: str, kind: str, name: str, body: Manifest | None = None, query: str = ""
    ) -> Manifest:
        with self._open(method, kind, name, body, query, REQUEST_SECONDS) as answer:
            data = json.load(answer)
        return data if isinstance(data, dict) else {}

    @contextmanager
    def _open(
        self,
        method: str,
        kind: str,
        name: str,
        body: Manifest | None,
        query: str,
        seconds: float,
    ) -> Iterator[Any]:
        path = PATHS[kind].format(namespace=self.namespace)
        url = f"{self._url}{path}{f'/{name}' if name else ''}{f'?{query}' if query else ''}"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        if self._token_file is not None:  # read each time: the kubelet renews it
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        where = f"{method} {kind} {name}".rstrip()
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=self._context) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, _read_reason(error), where) from None
        except (OSError, ValueError) as error:
            raise RendezvousError(f"{error}", where=where) from None


def _read_reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["message"])[:500]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason


def in_cluster_api(namespace: str, environ: Mapping[str, str] = os.environ) -> KubernetesApi:
    """
    Return the API as the account of this pod sees it.

    Raises:
        ConfigError: this process is not in a pod with an account.
    """
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = ACCOUNT_FOLDER / "token"
    if not host or not token.exists():
        raise ConfigError(
            "this is not a pod with a service account",
            where="pdrun k8s operator run",
            hint="use --proxy to run it with the login of your kubectl",
        )
    context = ssl.create_default_context(cafile=str(ACCOUNT_FOLDER / "ca.crt"))
    name = f"[{host}]" if ":" in host else host
    return KubernetesApi(f"https://{name}:{port}", namespace, token_file=token, context=context)


@contextmanager
def proxied_api(namespace: str, context: str = "") -> Iterator[KubernetesApi]:
    """
    Yield the API through ``kubectl proxy`` on a loopback port, which ends with the block.

    Raises:
        PdrunError: kubectl is missing, or its proxy did not start.
    """
    from pdrun.launcher.k8s.kubectl import Kubectl

    command = Kubectl(context=context).make_command("proxy", "--port=0", "--address=127.0.0.1")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode("utf-8", "replace")
        match = re.search(r"127\.0\.0\.1:([0-9]+)", line)
        if match is None:
            raise PdrunError(f"kubectl proxy did not start: {line.strip()[:300]}")
        yield KubernetesApi(f"http://127.0.0.1:{match[1]}", namespace)
    finally:
        process.terminate()
        process.wait(PROXY_START_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


def own_namespace() -> str:
    """Return the namespace of this pod; ``default`` elsewhere."""
    try:
        return (ACCOUNT_FOLDER / "namespace").read_text().strip() or "default"
    except OSError:
        return "default"
