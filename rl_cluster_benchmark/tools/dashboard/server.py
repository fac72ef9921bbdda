"""The server: loopback only, read-only, and only for a browser that meant to ask it."""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.dashboard.state import Directory
from rl_cluster_benchmark.tools.reports.report import script_hashes, source, templates

ADDRESS = "127.0.0.1"
HOSTS = ("localhost", "127.0.0.1", "[::1]")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path, port: int) -> None:
        self.directory = Directory(root)
        scripts = [source("charts.js"), source("dashboard.js")]
        self.page = templates().get_template("dashboard.html").render(
            css=Markup(source("style.css")), charts_js=Markup(scripts[0]), dashboard_js=Markup(scripts[1])
        )  # fmt: skip
        self.policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src {script_hashes(scripts)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10
    server_version, sys_version = "rlcb", ""

    def do_GET(self) -> None:
        if not self._is_for_us():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"This page answers to localhost only.\n")
            return
        address = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(address.query)
        if address.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.encode())
        elif address.path == "/data":
            self._send_json(self.server.directory.snapshot)
        elif address.path == "/series":
            self._send_json(partial(self.server.directory.series, query.get("run", [""])[0]))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    def _is_for_us(self) -> bool:
        """Return whether the request names this machine: a foreign name that points here must not read runs."""
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        return name.lower() in HOSTS and port in ("", str(self.server.server_address[1]))

    def _send_json(self, make: Callable[[], Any]) -> None:
        try:
            data = make()
            content = json.dumps(data, allow_nan=False).encode()
        except Exception as error:  # the page says that what it shows is old, and asks again
            text = f"This cannot be shown ({type(error).__name__}: {error}).\n"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text.encode(errors="replace"))
            return
        if data is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such run.\n")
        else:
            self._send(HTTPStatus.OK, "application/json", content)

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line every two seconds on the terminal helps nobody."""


def serve(directory: str, port: int) -> int:
    root = Path(directory)
    if not directory or not root.is_dir():
        raise UserError(f"{root} is not a directory; give the one that runs are written to.")
    try:
        server = Server(root, port)
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} cannot be used ({error}); choose another with --port.") from None
    with server:
        print(f"Watching {root} at {server.url} (Ctrl-C ends it; nothing is written)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
