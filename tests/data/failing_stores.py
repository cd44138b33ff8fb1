"""Stores of token files that fail by a plan: behind fsspec without a network, and a server of HTTP with ranges."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

SHORT, REFUSED, RESET, HANGING, FORBIDDEN = "short", "refused", "reset", "hanging", "forbidden"
KINDS = (SHORT, REFUSED, RESET, HANGING)
HANG_SECONDS = 0.3  # longer than a request may take where tests set that to a tenth
ERRORS = {
    REFUSED: OSError("503 SlowDown: https://user:secret@host"),
    RESET: ConnectionResetError("the connection was reset"),
    HANGING: TimeoutError("nothing answers"),
    FORBIDDEN: PermissionError("the token has expired"),
}


class Plan:
    """The faults of requests: drawn with a seed, or all from one on."""

    def __init__(self, share: float = 0.0, *, seed: int = 0, kinds: tuple[str, ...] = KINDS, first: int = 0) -> None:
        self._draw, self._share, self._kinds, self._first = random.Random(seed), share, kinds, first
        self._lock = threading.Lock()
        self.requests, self.faults = 0, 0

    def next(self) -> str | None:
        """The fault of the next request, or None."""
        with self._lock:
            self.requests += 1
            if self.requests <= self._first or self._draw.random() >= self._share:
                return None
            self.faults += 1
            return self._draw.choice(self._kinds)


class PlannedFiles(LocalFileSystem):
    """A folder of this machine as a store that takes one request at a time, `planned:///path`."""

    protocol = "planned"
    cachable = False
    plan = Plan()

    def info(self, path: str, **named: Any) -> Any:
        if error := ERRORS.get(PlannedFiles.plan.next() or ""):
            raise error
        return super().info(path, **named)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> bytes:
        fault = PlannedFiles.plan.next() or ""
        if error := ERRORS.get(fault):
            raise error
        content: bytes = super().cat_file(path, start=start, end=end, **named)
        return content[: len(content) // 2] if fault == SHORT and start is not None else content

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).replace("planned://", "file://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"planned://{self._strip_protocol(name)}"


@contextmanager
def planned(folder: Path, plan: Plan | None = None) -> Iterator[str]:
    """The URL of a folder as a store without a network."""
    fsspec.register_implementation("planned", PlannedFiles, clobber=True)
    PlannedFiles.plan = plan or Plan()
    yield f"planned://{folder}"
    PlannedFiles.plan = Plan()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client's acknowledgment of its head
    folder: Path
    plan: Plan
    serves_ranges: bool

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        fault = self.plan.next()
        if fault in (HANGING, RESET):
            if fault == HANGING:
                time.sleep(HANG_SECONDS)
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if fault in (REFUSED, FORBIDDEN) or not path.is_file():
            self._end({REFUSED: 503, FORBIDDEN: 403}.get(fault or "", 404))
            return
        status, body, stat = 200, path.read_bytes(), path.stat()
        headers = {"ETag": f'"{stat.st_mtime_ns}-{stat.st_ino}"'}
        if self.serves_ranges and (stated := self.headers.get("Range")):
            first, last = map(int, stated.removeprefix("bytes=").split("-"))
            if first >= stat.st_size:
                self._end(416)
                return
            status, body = 206, body[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{stat.st_size}"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not is_head:
            self.wfile.write(body[: len(body) // 2] if fault == SHORT else body)
            self.close_connection = fault == SHORT

    def _end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients go away: no traceback for each."""


@contextmanager
def http_server(folder: Path, plan: Plan | None = None, *, serves_ranges: bool = True) -> Iterator[str]:
    """The URL of a folder behind HTTP, in a thread of this process."""
    stated = {"folder": folder, "plan": plan or Plan(), "serves_ranges": serves_ranges}
    handler: Callable[..., Any] = type("Handler", (_Handler,), stated)
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
