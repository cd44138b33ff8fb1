"""Token files at `hf://`, by a server that answers as the Hugging Face Hub does what its driver asks."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from megatron_fanformer.data import remote_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.remote_files import find, listed, refuse_changed
from megatron_fanformer.data.survey import survey_data
from megatron_fanformer.errors import CorruptError, InputError
from tests.data.test_remote_files import assert_equal, config_of, items
from tests.data.token_making import write_npy, write_pair

API, FILES = "/api/datasets/some/tokens", "/datasets/some/tokens/resolve/main/"
URL = "hf://datasets/some/tokens"


class _Hub(BaseHTTPRequestHandler):
    """A data set `some/tokens`, by the endpoints of the Hub that list and read files."""

    protocol_version = "HTTP/1.1"
    folder: Path
    ranges: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if path in (API, f"{API}/revision/main"):
            self._answer_json({"id": "some/tokens", "sha": 40 * "a", "private": False, "tags": [], "siblings": []})
        elif path.startswith(f"{API}/tree/main"):
            below = self.folder / path.removeprefix(f"{API}/tree/main").strip("/")
            pattern = "**/*" if parse_qs(parts.query)["recursive"] == ["true"] else "*"
            self._answer_json([self._entry(found) for found in sorted(below.glob(pattern))])
        elif path.startswith(FILES):
            content = (self.folder / path.removeprefix(FILES)).read_bytes()
            self.ranges.append(self.headers["Range"])
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self._answer(206, content[first : last + 1])
        else:  # as the Hub answers those who are not logged in
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, path: Path) -> dict[str, Any]:
        named = {"type": "directory" if path.is_dir() else "file", "path": str(path.relative_to(self.folder))}
        content = b"" if path.is_dir() else path.read_bytes()
        return {**named, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "there" / "deep").mkdir(parents=True)
    write_pair(made.parent / "first", [[200 + number] for number in range(30)])
    write_npy(made.parent / "one.npy", 3000, seed=1)
    write_npy(made / "two.npy", 2077, seed=2)
    return made.parent


@pytest.fixture(autouse=True)
def ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ranges that are requested of the server while it runs."""
    remote_files.forget()
    monkeypatch.setattr(remote_files, "PAUSES_SECONDS", (0.01,) * 3)
    handler: Any = type("Hub", (_Hub,), {"folder": folder, "ranges": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"  # as HF_ENDPOINT, which was read at the import
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield handler.ranges
        server.shutdown()
        thread.join()


@pytest.mark.full
def test_samples_are_those_of_the_local_files(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert_equal(items(config_of(URL, cache, "mixed")), items(config_of(folder, cache, "mixed")))
    assert listed(f"{URL}/**/*.npy", ".npy") == [f"{URL}/deep/two.npy", f"{URL}/one.npy"]


def test_a_read_requests_its_bytes_and_no_more(folder: Path, ranges: list[str]) -> None:
    file = find(f"{URL}/one.npy")
    assert file is not None
    assert file.read(64, 1000) == (folder / "one.npy").read_bytes()[1000:1064]
    assert ranges == ["bytes=1000-1063"]


def test_a_changed_file_and_a_wrong_name_end_in_one_line(folder: Path, tmp_path: Path) -> None:
    file = find(f"{URL}/one.npy")
    assert file is not None
    (folder / "one.npy").write_bytes((folder / "one.npy").read_bytes()[::-1])
    with pytest.raises(CorruptError, match=r"one\.npy is another file than when the run began"):
        refuse_changed([file])
    with pytest.raises(InputError, match=r"hf://datasets/some/tokens/none\.npy does not exist"):
        survey_data(DataConfig(train_data=[f"{URL}/none.npy"], cache_path=str(tmp_path)))
    with pytest.raises(InputError, match=r"other/one\.npy cannot be used .*; check its name and rights"):
        find("hf://datasets/some/other/one.npy")
