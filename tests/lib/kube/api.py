"""Requests to an API server: JSON in, JSON out."""

from __future__ import annotations

import http.client
import io
import json
import ssl
import threading
import urllib.error
from typing import Any

Item = dict[str, Any]


class ApiClient:
    """
    A client without caches, for any number of threads.

    Raises:
        urllib.error.HTTPError: a method's request was refused.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._host = url.removeprefix("https://")
        self._local = threading.local()
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        try:
            return self._send("GET", "/readyz", None, "text/plain") == b"ok"
        except (OSError, urllib.error.URLError):
            return False

    def request(self, method: str, path: str, body: Item | None = None, kind: str = "") -> Item:
        """Send a request; ``kind`` is the content type of a patch."""
        data = None if body is None else json.dumps(body).encode()
        answer: Item = json.loads(self._send(method, path, data, kind or "application/json"))
        return answer

    def merge(self, path: str, body: Item) -> Item:
        """Apply a merge patch."""
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def _send(self, method: str, path: str, data: bytes | None, kind: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        status, reason, answered, content = self._exchange(method, path, data, headers)
        if status >= 400:
            body = io.BytesIO(content)
            raise urllib.error.HTTPError(self._url + path, status, reason, answered, body)
        return content

    def _exchange(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str, http.client.HTTPMessage, bytes]:
        """
        Send a request over this thread's connection: a handshake costs more than an answer, and a
        kubelet asks ten times a second. One that the server has closed meanwhile is made again.
        """
        is_used = hasattr(self._local, "connection")
        if not is_used:
            self._local.connection = http.client.HTTPSConnection(
                self._host, timeout=20, context=self._context
            )
        connection: http.client.HTTPSConnection = self._local.connection
        try:
            connection.request(method, path, data, headers)
            with connection.getresponse() as answer:
                return answer.status, answer.reason, answer.headers, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            del self._local.connection
            if is_used and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                return self._exchange(method, path, data, headers)
            raise urllib.error.URLError(error) from error
