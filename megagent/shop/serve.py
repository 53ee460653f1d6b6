"""`megagent shop serve` and `replay --web`: the page, its files and its JSON over HTTP, for this machine's browser.

What a shop on a developer's machine must not do is answer other people's web pages. So: it listens on loopback; the
Host header must be an address or a name of this machine, which no rebound DNS name is; changes come as JSON from the
same origin only; and the page runs no script but its own, in which text stays text.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import socketserver
import sys
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megagent.errors import MegagentError
from megagent.shop.replay import chosen
from megagent.shop.sites import Refused, ReplaySite, ShopSite, Site
from megagent.shop.visit import ShopOptions, open_shop

LOOPBACK = "127.0.0.1"
LARGEST_BODY = 16 * 1024  # bytes of a POST
IDLE_S = 30.0  # a connection that says nothing for so long is closed

_ASSETS = {
    "/": ("shop.html", "text/html; charset=utf-8"),
    "/shop.css": ("shop.css", "text/css; charset=utf-8"),
    "/shop.js": ("shop.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


def serve_shop(options: ShopOptions, host: str, port: int) -> None:
    """Serves the shop until Ctrl-C. Raises ConfigError, CatalogError, and MegagentError where it cannot listen."""
    # The port first: to open a large folder takes time, and is in vain if another program has the port.
    with WebServer(host, port) as server:
        shop = open_shop(options)
        server.serve(ShopSite(shop), f"{len(shop)} tasks in the {shop.panel} panel. Shop at")


def serve_replay(path: Path, episode: int | None, host: str, port: int) -> None:
    """Serves recorded episodes until Ctrl-C. Raises MegagentError for a malformed file."""
    episodes = chosen(path, episode)
    with WebServer(host, port) as server:
        server.serve(ReplaySite(episodes, path.name), f"Recorded episodes: {len(episodes)}. Look at")


class WebServer(socketserver.ThreadingMixIn, HTTPServer):
    """A thread a connection; the threads end with the process."""

    daemon_threads = True
    block_on_close = False
    site: Site  # set before the first request is read

    def __init__(self, host: str, port: int) -> None:
        """Listens, at a free port for port 0. Raises MegagentError where that is not possible."""
        if not 0 <= port <= 65535:
            raise MegagentError(f"--port {port}: must be 0 (any free port) to 65535")
        self.host = host
        try:
            # A name such as localhost can have addresses of both kinds; the first one will do.
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise MegagentError(_why_not(error, host, port)) from None

    def server_bind(self) -> None:
        # Not HTTPServer's: that one asks the name service for this machine's full name, which can take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.socket.getsockname()[1]

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_port}/"

    def serve(self, site: Site, saying: str) -> None:
        """Answers until Ctrl-C, which ends it without an error. saying: printed before the address."""
        self.site = site
        if not _is_loopback(self.host):
            print(
                f"megagent: warning: --host {self.host} lets everybody who reaches this machine use the page; "
                "there is no password.",
                file=sys.stderr,
                flush=True,
            )
        try:
            print(f"{saying} {self.address} (Ctrl-C ends)", flush=True)
            self.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nClosed.", flush=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that hangs up in the middle of an answer is nothing to report.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, respond: Any) -> None:
        try:
            self._check_host()
            try:
                content, kind = respond()
            except ValueError as error:  # urlsplit, of http://[
                raise Refused(400, f"the address or the origin is malformed ({error})") from None
        except Refused as refusal:
            # What is left of the request's body would be read as the next request.
            self.close_connection = True
            self._send(refusal.status, _json({"error": str(refusal)}), "application/json")
            return
        self._send(HTTPStatus.OK, content, kind)

    def _get(self) -> tuple[bytes, str]:
        path = urlsplit(self.path).path
        if path in _ASSETS:
            name, kind = _ASSETS[path]
            return _asset(name), kind
        return _json(self.server.site.get(self._api_path(path))), "application/json"

    def _post(self) -> tuple[bytes, str]:
        path = self._api_path(urlsplit(self.path).path)
        # A page of another origin can send neither this type nor this header without asking first, and is not answered.
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            raise Refused(403, "requests of other sites' pages are not answered")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "the body must be application/json")
        return _json(self.server.site.post(path, self._body())), "application/json"

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "the length of the body must be given")
        if int(length[:12]) > LARGEST_BODY:
            raise Refused(413, f"the body has more than {LARGEST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body

    def _api_path(self, path: str) -> list[str]:
        if not path.startswith("/api/"):
            raise Refused(404, "no such page")
        return path.removeprefix("/api/").split("/")

    def _check_host(self) -> None:
        host = _host_of(self.headers.get("Host", ""))
        if host not in ("localhost", self.server.host.lower(), _machine()) and not _is_address(host):
            raise Refused(421, "the Host header names no address or name of this machine")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
            *((("Connection", "close"),) if self.close_connection else ()),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "megagent"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        pass  # a person who clicks does not want a line a click


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def _asset(name: str) -> bytes:
    return (files("megagent.shop") / "web" / name).read_bytes()


@cache
def _machine() -> str:
    return socket.gethostname().lower()


def _host_of(header: str) -> str:
    """The host of a Host header, without its port: of [::1]:80 it is ::1."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: another program listens there; take another one, or --port 0 for any free port."
    if error.errno == errno.EACCES:
        return f"--port {port}: this user may not listen there; take one above 1023."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: no address of this machine; use {LOOPBACK}, or 0.0.0.0 for all of them."
    return f"--host {host} --port {port}: cannot listen there ({error.strerror})."
