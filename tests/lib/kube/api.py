"""Requests to an API server: JSON in, JSON out."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

Item = dict[str, Any]


class ApiClient:
    """
    A client without caches.

    Raises:
        urllib.error.HTTPError: a method's request was refused.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
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
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20, context=self._context) as answer:
            content: bytes = answer.read()
        return content
