"""
Stands for a server such as vLLM, to try `pdrun serve` without one: an OpenAI-like interface that
"generates" the word that follows in the alphabet. Rank 0 answers, the other ranks compute nothing.

    pdrun serve --backend cpu --devices 2 --health 'http://127.0.0.1:{port}/v1/completions' \
        python examples/completions_server.py --port '{port}' --rank '{rank}' --tp '{tp}'
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "a", "max_tokens": 3}'
"""

from __future__ import annotations

import argparse
import http.server
import json
import signal
import string
from typing import Any


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET of /health and /v1/models, and POST of /v1/completions."""

    def do_GET(self) -> None:
        """Answer without the model: such an answer does not show that it works."""
        self.answer(200, {"data": [{"id": "alphabet"}]})

    def do_POST(self) -> None:
        """Generate."""
        length = int(self.headers.get("Content-Length", "0"))
        try:
            asked = json.loads(self.rfile.read(length))
            prompt, count = str(asked["prompt"]), int(asked.get("max_tokens", 16))
        except (ValueError, LookupError, TypeError) as error:
            self.answer(400, {"error": str(error)})
            return
        letters = string.ascii_lowercase
        start = letters.find(prompt[-1:]) + 1
        text = "".join(letters[(start + step) % 26] for step in range(count))
        usage = {"completion_tokens": count}
        self.answer(200, {"choices": [{"text": text}], "usage": usage})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        """Send JSON."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing per request."""


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at the job is no traceback here
    if args.rank > 0:
        signal.pause()
    print(f"serving on port {args.port} with tp={args.tp}", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
