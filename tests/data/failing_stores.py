"""Stores of token files that fail by a plan: behind fsspec without a network, and a server of HTTP with ranges."""

import email.utils
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


class Plan:
    """Which requests fail, and how: drawn with a seed, or all from one on."""

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

    def _fault(self) -> str | None:
        fault = PlannedFiles.plan.next()
        if fault == REFUSED:
            raise OSError("503 SlowDown: https://user:secret@host")
        if fault == RESET:
            raise ConnectionResetError("the connection was reset")
        if fault == HANGING:
            raise TimeoutError("nothing answers")
        if fault == FORBIDDEN:
            raise PermissionError("the token has expired")
        return fault

    def info(self, path: str, **named: Any) -> Any:
        self._fault()
        return super().info(path, **named)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **named: Any) -> bytes:
        fault = self._fault()
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
    latency_seconds: float
    serves_ranges: bool

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        fault = self.plan.next()
        time.sleep(self.latency_seconds)
        if fault == HANGING:
            time.sleep(HANG_SECONDS)
            self.close_connection = True
            return
        if fault == RESET:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault in (REFUSED, FORBIDDEN):
            self._end(503 if fault == REFUSED else 403)
            return
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self._end(404)
            return
        found = path.stat()
        tag = f'"{found.st_mtime_ns}-{found.st_ino}"'
        status, span, size = 200, (0, found.st_size), found.st_size
        if self.serves_ranges and (stated := self.headers.get("Range")):
            first, _, last = stated.removeprefix("bytes=").partition("-")
            span = (int(first), min(size, int(last) + 1))
            if span[0] >= size:
                self._end(416)
                return
            status = 206
        with path.open("rb") as stream:
            stream.seek(span[0])
            body = stream.read(span[1] - span[0])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", email.utils.formatdate(found.st_mtime, usegmt=True))
        if status == 206:
            self.send_header("Content-Range", f"bytes {span[0]}-{span[1] - 1}/{size}")
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
def http_server(
    folder: Path,
    plan: Plan | None = None,
    *,
    latency_seconds: float = 0.0,
    serves_ranges: bool = True,
) -> Iterator[str]:
    """The URL of a folder behind HTTP, in a thread of this process."""
    stated = {"folder": folder, "plan": plan or Plan(), "latency_seconds": latency_seconds}
    stated |= {"serves_ranges": serves_ranges}
    handler: Callable[..., Any] = type("Handler", (_Handler,), stated)
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
