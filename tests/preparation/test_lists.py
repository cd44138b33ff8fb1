"""Lists of inputs for tasks on many machines: written, prepared by tasks of which one is lost, and merged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_fanformer.checkpoint import run_lock as run_lock_module
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.cli import main
from megatron_fanformer.data.blends import parse_blend, parse_chats
from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from megatron_fanformer.errors import CorruptError, InputError, Interrupted
from megatron_fanformer.preparation import list_tasks
from megatron_fanformer.preparation import lists as lists_module
from megatron_fanformer.preparation.list_merge import merge_lists
from megatron_fanformer.preparation.list_status import show_status, status_of
from megatron_fanformer.preparation.list_tasks import prepare_lists
from megatron_fanformer.preparation.lists import read_lists, write_lists
from megatron_fanformer.preparation.verb import PrepareConfig
from tests.data.chat_making import made_up_chats
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.preparation import commands
from tests.preparation.making import Prepare, as_line
from tests.preparation.test_interrupted import hashes
from tests.small_runs import start_command

RunTask = Callable[..., None]


def files_of_sizes(folder: Path, sizes: dict[str, int]) -> list[Path]:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return sorted(folder.iterdir())


def listed(folder: Path) -> list[list[str]]:
    """Names of the files of each list."""
    lists = read_lists(folder)
    return [[Path(path).name for path in lists.paths(record.name)] for record in lists.records]


# -- writing lists


def test_the_largest_file_goes_to_the_lightest_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a.txt": 70, "b.txt": 50, "c.txt": 50, "d.jsonl.gz": 32, "e.txt": 30, "f.txt": 20, "g.txt": 20, "h.md": 0}
    files = files_of_sizes(tmp_path / "files", sizes)
    monkeypatch.chdir(tmp_path)
    line = write_lists([file.relative_to(tmp_path) for file in files], 3, Path("lists"))
    # By weight: d 80 (2.5 times 32), a 70, b 50; then c to b, e to a, f and g to d, and h to a, which has fewer files.
    assert listed(tmp_path / "lists") == [
        ["d.jsonl.gz", "f.txt", "g.txt"],
        ["a.txt", "e.txt", "h.md"],
        ["b.txt", "c.txt"],
    ]
    records = read_lists(tmp_path / "lists").records
    assert [(each.name, each.files, each.bytes) for each in records] == [
        ("000", 3, 72),
        ("001", 3, 100),
        ("002", 2, 100),
    ]
    assert (tmp_path / "lists" / "002").read_text() == f"{tmp_path}/files/b.txt\n{tmp_path}/files/c.txt\n"
    assert line == "lists: 3 lists, of 8 files with 272 bytes; by bytes of text the largest is 1.20 times the smallest"


def test_no_list_is_without_a_file_and_names_have_the_digits_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of_sizes(tmp_path / "files", {f"{number}.txt": 0 for number in range(11)})
    monkeypatch.setattr(lists_module, "DIGITS", 1)
    assert "3 lists, not 5: no file is cut, of 3 files with 0 bytes" in write_lists(files[:3], 5, tmp_path / "few")
    assert [len(each) for each in listed(tmp_path / "few")] == [1, 1, 1]
    write_lists(files, 11, tmp_path / "many")
    assert [record.name for record in read_lists(tmp_path / "many").records][::5] == ["00", "05", "10"]


def test_lists_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (odd,) = files_of_sizes(tmp_path / "files", {"a\u2028b.txt": 1})
    for files, number, message in (([odd], 1, "rename the file"), ([odd], 0, "at least 1")):
        with pytest.raises(InputError, match=message):
            write_lists(files, number, tmp_path / "lists")
    assert not (tmp_path / "lists").exists()
    with pytest.raises(InputError, match="already exists"):
        write_lists([tmp_path / "files"], 1, tmp_path)


# -- tasks


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Six files of which three lists are made, of two sources and none; `0.jsonl` is as large as all others."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(1, 5):
        lines = [as_line(f"file {number} document {n}") for n in range(10 * number)] + [b"{"] * number
        (folder / f"{number}.jsonl").write_bytes(b"\n".join(lines))
    (folder / "5.txt").write_text("a text")
    line = json.dumps({"id": "0", "text": "one two three " * 500, "source": "web"}).encode()
    (folder / "0.jsonl").write_bytes((line + b"\n") * 10)
    return folder


@pytest.fixture
def lists(tmp_path: Path, documents: Path) -> Path:
    write_lists(sorted(documents.iterdir()), 3, tmp_path / "lists")
    return tmp_path / "lists"


@pytest.fixture
def run_task(tmp_path: Path, lists: Path, small_tokenizer_file: Path) -> RunTask:
    """A task in this process."""

    def run(task: int | None = None, **settings: Any) -> None:
        options = {"output": str(tmp_path / "data" / "x"), "tokenizer": str(small_tokenizer_file), **settings}
        prepare_lists(PrepareConfig(from_lists=lists, task=task, workers=1, **options))

    return run


def stages(lists: Path) -> list[str]:
    return [each.stage for each in status_of(read_lists(lists))]


def test_a_lost_tasks_list_is_taken_up_and_the_merged_whole_is_that_of_one_preparation(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path, prepare: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three processes as a cluster's tasks: the first is killed within its list."""
    long = documents / "0.jsonl"
    long.write_bytes(long.read_bytes() * 30)  # 2.1 MB, in three blocks
    lists, data = tmp_path / "lists", tmp_path / "data"
    write_lists(sorted(documents.iterdir()), 3, lists)
    words = ["--from-lists", str(lists), "--output", str(data / "x"), "--tokenizer", str(small_tokenizer_file)]
    words += ["--workers", "1"]

    lost = start_command("prepare", *words, "--task", "0")
    tokens = data / "x-000.parts" / "000000.tokens"
    wait_until(lambda: tokens.exists() and tokens.stat().st_size, lost)
    assert stages(lists) == ["running", "left", "left"]
    commands.kill_all(lost)
    assert stages(lists) == ["left"] * 3

    tasks = [start_command("prepare", *words, "--task", str(task)) for task in (1, 2)]
    printed = "".join(task.communicate(timeout=PATIENCE_SECONDS)[0] for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0]
    assert sorted(line.split(":")[0] for line in printed.splitlines() if "lines read" in line) == [
        f"list {name}" for name in ("000", "001", "002")
    ]
    for name in ("000", "001", "002"):
        prepare(tmp_path / "undisturbed" / f"x-{name}", f"@{lists / name}")
    assert hashes(data) == hashes(tmp_path / "undisturbed")

    capsys.readouterr()
    merge_lists(lists)
    whole, merged = prepare(tmp_path / "whole", documents).manifest, read_any_manifest(str(data / "x"))
    assert isinstance(merged, Manifest)
    sums = ("lines_read", "documents", "tokens", "text_bytes", "max_token_id", "refused", "by_source", "settings")
    assert {name: getattr(merged, name) for name in sums} == {name: getattr(whole, name) for name in sums}
    assert sorted(merged.inputs, key=lambda record: record.path) == whole.inputs
    sources = parse_blend([f"@{data}/x.blend"]).sources
    assert [source.paths for source in sources] == [(f"{data}/x-{name}",) for name in ("000", "001", "002")]
    by_source = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[-3:]}
    assert by_source == {"none": "1", "test": "100", "web": "300"}
    before = hashes(data)
    merge_lists(lists)
    assert hashes(data) == before


def test_a_list_of_a_task_that_a_signal_ends_is_free_at_once_elsewhere(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = documents / "0.jsonl"
    long.write_bytes(long.read_bytes() * 30)
    lists, output = tmp_path / "lists", tmp_path / "data" / "x"
    write_lists([long], 1, lists)
    words = ["--from-lists", str(lists), "--output", str(output), "--tokenizer", str(small_tokenizer_file)]
    task = start_command("prepare", *words, "--workers", "1")
    tokens = tmp_path / "data" / "x-000.parts" / "000000.tokens"
    wait_until(lambda: tokens.exists() and tokens.stat().st_size, task)
    task.terminate()
    errors = task.communicate(timeout=PATIENCE_SECONDS)[1]
    assert task.returncode == Interrupted.exit_code
    assert errors.splitlines()[-1].startswith("megatron-fanformer: stopped on SIGTERM before the end; what is done is")

    def is_renewed(*_: object) -> bool:
        raise AssertionError("it waits for a sign of life")

    monkeypatch.setattr(run_lock_module, "_place", lambda: "another machine")
    monkeypatch.setattr(run_lock_module, "_is_touched", is_renewed)
    assert stages(lists) == ["left"]
    prepare_lists(PrepareConfig(from_lists=lists, output=str(output), tokenizer=str(small_tokenizer_file), workers=1))
    assert stages(lists) == ["done"]


def test_a_list_that_fails_is_passed_over_and_tried_again_by_its_own_task(
    documents: Path, lists: Path, run_task: RunTask, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = (documents / "0.jsonl").read_bytes()
    (documents / "0.jsonl").unlink()
    with pytest.raises(InputError, match=r"list 000: .*0\.jsonl does not exist"):
        run_task(0)
    assert stages(lists) == ["failed", "done", "done"]
    (documents / "0.jsonl").write_bytes(sound)
    capsys.readouterr()
    run_task(1)
    assert stages(lists) == ["failed", "done", "done"]
    show_status(lists, as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("nothing is left for this task")
    assert [line.split() for line in shown[2:4]] == [
        ["done", "2", *shown[2].split()[2:5], "001-002"],
        ["failed", "1", *shown[3].split()[2:5], "000"],
    ]
    assert shown[4].startswith("000: ") and "0.jsonl does not exist" in shown[4]
    assert shown[5].startswith("2 of 3 lists done; 7%")
    run_task(0)
    capsys.readouterr()
    show_status(lists, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"done": 3, "running": 0, "failed": 0, "left": 0}
    assert [each["documents"] for each in found["lists"]] == [10, 51, 50]


def test_a_list_that_failed_and_is_whole_is_done(lists: Path, run_task: RunTask) -> None:
    """As one whose task could write its manifest, and then not remove its folder."""
    run_task()
    opened = read_lists(lists)
    state = opened.read_state("000")
    assert state is not None
    opened.write_state("000", msgspec.structs.replace(state, error="the disk failed"))
    with pytest.raises(CorruptError, match="list 000 has failed: the disk failed; prepare what is not done"):
        merge_lists(lists)
    run_task(1)
    assert stages(lists) == ["done"] * 3 and opened.read_state("000") == state
    merge_lists(lists)


def test_a_list_that_another_task_has_is_left_to_it(lists: Path, run_task: RunTask) -> None:
    with run_lock(read_lists(lists).task_folder("001")):
        run_task(2)
        assert stages(lists) == ["done", "running", "done"]
    assert stages(lists) == ["done", "left", "done"]
    run_task(7)  # of a larger array
    assert stages(lists) == ["done"] * 3


def test_a_task_with_other_options_than_the_first_is_refused(lists: Path, run_task: RunTask) -> None:
    run_task()
    others = {"min_length 0 and not 3": {"min_length": 3}, "eod_id": {"eod_id": 5}, "output /.*x and": {"output": "/y"}}
    for message, settings in others.items():
        with pytest.raises(InputError, match=f"{lists} was begun with {message}"):
            run_task(0, **settings)


def test_options_that_left_nothing_behind_may_be_corrected(tmp_path: Path, lists: Path, run_task: RunTask) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="list 000: "):
        run_task(output=str(tmp_path / "file" / "x"))
    assert stages(lists) == ["failed"] * 3
    run_task()
    assert stages(lists) == ["done"] * 3


def test_a_list_without_documents_is_done_and_counted(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path, prepare: Prepare
) -> None:
    """With a rule that leaves one list with none, as one preparation of all would not notice."""
    lists, data = tmp_path / "lists", tmp_path / "data"
    write_lists(sorted(documents.iterdir()), 3, lists)
    options = {"output": str(data / "x"), "tokenizer": str(small_tokenizer_file), "workers": 1, "max_length": 100}
    prepare_lists(PrepareConfig(from_lists=lists, **options))
    assert not (data / "x-000.manifest.json").exists() and stages(lists) == ["done"] * 3
    merge_lists(lists)
    merged, whole = read_any_manifest(str(data / "x")), prepare(tmp_path / "whole", documents, max_length=100).manifest
    assert isinstance(merged, Manifest)
    for name in ("lines_read", "documents", "tokens", "refused"):
        assert getattr(merged, name) == getattr(whole, name)
    assert sorted(merged.inputs, key=lambda record: record.path) == whole.inputs
    nothing = tmp_path / "nothing"
    write_lists([documents / "0.jsonl"], 1, nothing)
    prepare_lists(PrepareConfig(from_lists=nothing, **{**options, "output": str(data / "y")}))
    with pytest.raises(CorruptError, match="no list holds a document"):
        merge_lists(nothing)


def test_a_list_whose_files_are_others_is_not_taken_for_done(
    tmp_path: Path, documents: Path, lists: Path, run_task: RunTask
) -> None:
    run_task()
    (tmp_path / "data" / "x-001.bin").unlink()
    with pytest.raises(InputError, match=r"list 001: .*x-001.manifest.json exists, but not all files that it lists"):
        run_task()
    assert stages(lists) == ["done", "failed", "done"]
    for file in (tmp_path / "data").glob("x-001.*"):
        file.unlink()
    run_task()
    changed = Path((lists / "001").read_text().splitlines()[0])
    changed.write_bytes(b"".join(changed.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(CorruptError, match=rf"{changed} has changed since list 001 was prepared"):
        merge_lists(lists)
    with pytest.raises(InputError, match=r"list 001: output prefix .*x-001 already exists with other inputs"):
        run_task()
    for file in (tmp_path / "data").glob("x-001.*"):
        file.unlink()
    run_task()
    merge_lists(lists)
    write_lists(sorted(documents.iterdir()), 2, tmp_path / "others")
    options = {"output": str(tmp_path / "data" / "x"), "tokenizer": run_task_tokenizer(lists), "workers": 1}
    with pytest.raises(
        InputError, match=r"list 00[01]: output prefix .*x-00[01] already exists with other inputs.*; choose another"
    ):
        prepare_lists(PrepareConfig(from_lists=tmp_path / "others", **options))


def run_task_tokenizer(lists: Path) -> str:
    """The tokenizer that the tasks on a folder of lists have agreed on."""
    agreement = read_lists(lists).read_agreement()
    assert agreement is not None
    return agreement.tokenizer.path


def test_a_list_of_a_task_elsewhere_is_waited_for_as_long_as_it_may_be_lost(
    lists: Path, run_task: RunTask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = []
    found = list_tasks.holder_of

    def holder_of(folder: Path) -> Any:
        """List 001 is another machine's, until the third look at its end."""
        if folder.name.startswith("001") and len(looks) < 3:
            return SimpleNamespace(host="another")
        return found(folder)

    monkeypatch.setattr(list_tasks, "holder_of", holder_of)
    monkeypatch.setattr(list_tasks.time, "sleep", looks.append)
    run_task(1)
    assert len(looks) == 3 and stages(lists) == ["done"] * 3
    monkeypatch.setattr(list_tasks, "holder_of", lambda _: SimpleNamespace(host="another"))
    run_task(1)
    assert sum(looks[3:]) == list_tasks.LOST_SECONDS
    assert "nothing is left for this task, and other tasks have 3 lists" in capsys.readouterr().out


# -- merging


@pytest.mark.parametrize("format", ["megatron", pytest.param("npy", marks=pytest.mark.full)])
def test_lists_of_chats_are_merged_and_verified_as_a_whole(
    tmp_path: Path, olmo_tokenizer_file: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [json.dumps({"messages": messages}) for messages in made_up_chats(30)]
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text("\n".join([*chats[number::2], "{", "{"]))
    common, lists = ["--output", str(tmp_path / "x"), "--tokenizer", str(olmo_tokenizer_file)], str(tmp_path / "lists")
    chat = ["--chat", "--chat-template", "olmo", "--max-tokens", "300", "--format", format, "--workers", "1"]
    assert main(["prepare", str(tmp_path), "--chat", "--lists", "2", "--output", lists]) == 0
    assert main(["prepare", "--from-lists", lists, *common, *chat]) == 0
    assert main(["prepare", "--merge", lists]) == 0
    assert "34 lines read: 30 conversations" in capsys.readouterr().out
    assert [source.paths for source in parse_chats([f"@{tmp_path}/x.blend"]).sources] == [
        (f"{tmp_path}/x-00{number}",) for number in range(2)
    ]
    assert main(["inspect", str(tmp_path / "x"), "--verify"]) == 0


def test_what_is_not_whole_is_named_and_not_merged(
    tmp_path: Path, lists: Path, run_task: RunTask, prepare: Prepare
) -> None:
    run_task()
    prefix, own = tmp_path / "data" / "x-001", lists / "001"
    files, others = own.read_text().splitlines(), (lists / "002").read_text().splitlines()
    for folder in ("data", "lists"):
        shutil.copytree(tmp_path / folder, tmp_path / "sound" / folder)

    def prepare_again(*inputs: str, **settings: Any) -> None:
        for path in prefix.parent.glob("x-001*"):
            path.unlink()
        prepare(prefix, *inputs, **settings)

    def double() -> None:
        prepare_again(*files, others[0])
        own.write_text("\n".join([*files, others[0]]))

    faults: dict[str, Callable[[], Any]] = {
        "list 001 is not done": Path(f"{prefix}.manifest.json").unlink,
        "list 001 was prepared with min_length 1 and not 0": lambda: prepare_again(*files, min_length=1),
        r"list 001 names 4 files, and not the 3 .*; .*x-001 lacks .*2\.jsonl; prepare": lambda: own.write_text(
            "\n".join([*files, others[0]])
        ),
        r"names 0 files.*x-001 has, though it is not in the list, .*1\.jsonl and 2 more": lambda: own.write_text(""),
        r"list 001 names 4 files.*2\.jsonl is in 2 lists": double,
        r"x-001\.bin is missing, or not of the size": lambda: Path(f"{prefix}.bin").write_bytes(b""),
        "list 001: .*No such file": own.unlink,
        r"x-001\.manifest\.json is not a manifest": lambda: Path(f"{prefix}.manifest.json").write_text("{"),
    }
    for message, plant in faults.items():
        plant()
        with pytest.raises(CorruptError, match=message):
            merge_lists(lists)
        assert not {"x.blend", "x.manifest.json"} & {path.name for path in prefix.parent.iterdir()}
        for folder in ("data", "lists"):
            shutil.rmtree(tmp_path / folder)
            shutil.copytree(tmp_path / "sound" / folder, tmp_path / folder)
    merge_lists(lists)


def test_what_has_the_merged_names_already_is_left_alone(tmp_path: Path, lists: Path, run_task: RunTask) -> None:
    with pytest.raises(CorruptError, match="no list has been begun"):
        merge_lists(lists)
    run_task()
    (tmp_path / "data" / "x.blend").write_text("mine\n")
    with pytest.raises(InputError, match=r"x\.blend exists"):
        merge_lists(lists)
    assert not (tmp_path / "data" / "x.manifest.json").exists()


def test_names_that_a_blend_cannot_hold_are_refused_at_the_start(
    tmp_path: Path, lists: Path, run_task: RunTask, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, settings in {"my web": {}, "en,wiki": {"part_bytes": 1000}, "1e": {}}.items():
        with pytest.raises(InputError, match=f"'{name}-000.*', which is read as something else"):
            run_task(output=str(tmp_path / "data" / name), **settings)
    with pytest.raises(InputError, match=r"'1e-00000', which is read as something else"):
        prepare(tmp_path / "data" / "1e", tmp_path / "documents" / "5.txt", part_bytes=1000)
    assert not (tmp_path / "data").exists() and stages(lists) == ["left"] * 3
    monkeypatch.setattr(list_tasks, "refuse_outside_blends", lambda *_: None)  # as earlier versions
    run_task(output=str(tmp_path / "data" / "my web"))
    with pytest.raises(InputError, match="'my web-000', which is read as something else"):
        merge_lists(lists)
    assert not (tmp_path / "data" / "my web.blend").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a --output o", "--tokenizer is missing"),
        ("a --lists 2", "--output is missing"),
        ("a --lists 2 --output o --tokenizer t", "tokenizer is set, which has no effect with --lists"),
        ("--status l --merge l", "merge is set, which has no effect with --status"),
        ("--merge l --json", "json is set, which has no effect with --merge"),
        ("a --output o --tokenizer t --task 1", "task is set, which has no effect without --from-lists"),
        ("a --from-lists l --output o --tokenizer t", "a is an input beside those of --from-lists"),
        ("--status {}", "lists.json cannot be read"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    tmp_path: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *words.format(tmp_path).split()]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
