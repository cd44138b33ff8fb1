"""Stores that fail, behind fsspec, and checkpoints as far as copies are concerned."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST, check_files, read_manifest
from megatron_fanformer.checkpoint.remote import RemoteRun
from tests.patience import wait_until
from tests.small_runs import free_port, is_open

WEIGHTS = "__0_0.distcp"


def _failing(name: str) -> Any:
    """A call of a store, unless it is the one that is to fail."""

    def call(self: "FailingFiles", *arguments: Any, **named: Any) -> Any:
        self._fail_if_due()
        return getattr(LocalFileSystem, name)(self, *arguments, **named)

    return call


class FailingFiles(LocalFileSystem):
    """A store whose `target`-th call fails; 0: none, −1: all."""

    protocol = "failing"
    cachable = False
    target, count, kind = 0, 0, "refused"

    def _is_due(self) -> bool:
        FailingFiles.count += 1
        return FailingFiles.target in (-1, FailingFiles.count)

    def _fail_if_due(self) -> None:
        if self._is_due():
            raise TimeoutError("the store does not answer: store://user:secret@host")

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        is_due = self._is_due()
        if is_due and self.kind == "refused":
            raise TimeoutError("the store does not answer")
        super().pipe_file(path, value[: len(value) // 2] if is_due else value)
        if is_due:
            raise TimeoutError("the connection was lost")

    mkdir, mv, rm_file, ls, info, get_file = map(_failing, ("mkdir", "mv", "rm_file", "ls", "info", "get_file"))

    def rm(self, path: str, *arguments: Any, **named: Any) -> None:
        if self._is_due():
            if self.kind == "cut off" and Path(path).is_dir():
                min(Path(path).iterdir()).unlink()  # of several files, it has removed one
            raise TimeoutError("the store does not answer")
        super().rm(path, *arguments, **named)

    def put_file(self, path: str, target: str, **named: Any) -> None:
        self.pipe_file(target, Path(path).read_bytes())

    def open(self, path: str, mode: str = "rb", *arguments: Any, **named: Any) -> Any:
        if mode == "rb":
            self._fail_if_due()
        return super().open(path, mode, *arguments, **named)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).replace("failing://", "file://"))


def save(run: Path, step: int, content: bytes = b"", keep: int | None = None) -> Path:
    """A checkpoint as far as copies are concerned."""
    folder = run_folder.temporary_folder(run / run_folder.CHECKPOINTS, step)
    (folder / WEIGHTS).write_bytes(content or bytes(range(256)) * step)
    (folder / "empty.distcp").touch()
    (folder / run_folder.MEGATRON_METADATA).write_text("{}")
    return run_folder.publish_checkpoint(
        run / run_folder.CHECKPOINTS, step, folder, {"training": {"seed": step}}, keep=keep
    )


def there(folder: Path) -> list[str]:
    """The complete checkpoints in a store's folder, each of which is found sound."""
    names = sorted(path.parent.name for path in folder.glob(f"{run_folder.CHECKPOINTS}/step-*/{MANIFEST}"))
    for name in names:
        checkpoint = folder / run_folder.CHECKPOINTS / name
        check_files(checkpoint, read_manifest(checkpoint))
    return names


def step_names(*steps: int) -> list[str]:
    return [run_folder.checkpoint_name(step) for step in steps]


BUCKET = "checkpoints"
MISSING = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
needs_server = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install moto[server] s3fs")


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """moto's S3 server with a bucket, whose URL this is; this process and its children use it by their environment."""
    port = free_port()
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, *f"-m moto.server -p {port}".split()], stdout=log, stderr=log)
    try:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "testing"
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        wait_until(lambda: is_open(port), server)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # or the driver of an earlier server would serve
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()


def verified(url: str, folder: Path) -> int:
    """Fetch every checkpoint that a store publishes, which verifies it; how many there are."""
    remote = RemoteRun(url)
    names = remote.complete()
    for name in names:
        remote.fetch([name], folder, lambda _: None)
    shutil.rmtree(folder, ignore_errors=True)
    return len(names)
