"""Stores of token files: one behind fsspec without a network that fails by a plan, and a server of HTTP."""

import random
import threading
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
ERRORS = {
    REFUSED: OSError("503 SlowDown: https://user:secret@host"),
    RESET: ConnectionResetError("the connection was reset"),
    HANGING: TimeoutError("nothing answers"),
    FORBIDDEN: PermissionError("the token has expired"),
}


class Plan:
    """The faults of a share of requests, drawn with a seed."""

    def __init__(self, share: float = 0.0, *, kinds: tuple[str, ...] = KINDS) -> None:
        self._draw, self._share, self._kinds = random.Random(0), share, kinds
        self._lock = threading.Lock()
        self.requests, self.faults = 0, 0

    def next(self) -> str | None:
        """The fault of the next request, or None."""
        with self._lock:
            self.requests += 1
            if self._draw.random() >= self._share:
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
    serves_ranges: bool

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        status, body, stat = 200, path.read_bytes(), path.stat()
        headers = {"ETag": f'"{stat.st_mtime_ns}-{stat.st_ino}"'}
        if self.serves_ranges and (stated := self.headers.get("Range")):
            first, last = map(int, stated.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{stat.st_size}"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients go away: no traceback for each."""


@contextmanager
def http_server(folder: Path, *, serves_ranges: bool = True) -> Iterator[str]:
    """The URL of a folder behind HTTP, in a thread of this process."""
    handler: Callable[..., Any] = type("Handler", (_Handler,), {"folder": folder, "serves_ranges": serves_ranges})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
