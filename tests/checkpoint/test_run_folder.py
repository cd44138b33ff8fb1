"""The publication of checkpoints in a run's folder, the choice among them, and the section `checkpoint`."""

from pathlib import Path

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_folder import CheckpointConfig
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import CorruptError
from tests.checkpoint.stores import save
from tests.disk_steps import recorded_steps


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / run_folder.CHECKPOINTS).glob("[!.]*"))


def test_nothing_has_its_name_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power can fail: files, then their folder, its name, that name's folder, and only then `latest`, likewise."""
    steps = recorded_steps(monkeypatch)
    checkpoint = save(tmp_path, 10)
    renamed = steps.index(("rename", checkpoint.name))
    *flushed, (_, folder) = steps[:renamed]
    assert {name for kind, name in flushed if kind == "fsync"} == {path.name for path in checkpoint.iterdir()}
    assert folder.startswith(f".{checkpoint.name}.")
    (_, pointer) = steps[renamed + 2]
    assert pointer.startswith(f".{run_folder.LATEST}.")
    above = ("fsync", run_folder.CHECKPOINTS)
    assert steps[renamed + 1 :] == [above, ("fsync", pointer), ("rename", run_folder.LATEST), above]


def test_a_save_that_was_cut_off_is_never_found_and_goes_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 10)
    run_folder.temporary_folder(tmp_path / run_folder.CHECKPOINTS, 15)
    assert find_checkpoint(tmp_path).name == "step-00000010"
    save(tmp_path, 20)
    assert sorted(path.name for path in (tmp_path / run_folder.CHECKPOINTS).iterdir()) == [
        *("latest", "step-00000010", "step-00000020")
    ]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step-00000030", "step-00000040"]


def test_a_rewound_run_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)  # `latest` was set back to step 10
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000020", "step-00000030"]
    assert find_checkpoint(tmp_path).name == "step-00000015"


@pytest.mark.parametrize(
    "spoiled",
    [b"step-00000011\n", b"\xff\x00\xfe", b"x" * 5000, b"../checkpoints/step-00000010"],
    ids=["dangling", "binary", "long", "outside"],
)
def test_a_latest_that_names_nothing(tmp_path: Path, spoiled: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    folder = tmp_path / run_folder.CHECKPOINTS
    (folder / run_folder.LATEST).write_bytes(spoiled)
    assert run_folder.latest_checkpoint(tmp_path) == folder / "step-00000020"
    assert [path.name for path in run_folder.checkpoints_to_resume(tmp_path)] == ["step-00000020", "step-00000010"]
    assert "the newest checkpoint there that is sound is taken" in caplog.text
    run_folder.point_to(folder / "step-00000010", [])  # as a run does that found step 20 damaged
    assert run_folder.latest_checkpoint(tmp_path) == folder / "step-00000010"


def test_a_checkpoint_that_is_not_complete_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    (checkpoint / run_folder.MEGATRON_METADATA).unlink()
    assert run_folder.checkpoints_to_resume(tmp_path) == [checkpoint]
    for reader in (lambda: run_folder.latest_checkpoint(tmp_path), lambda: run_folder.check_complete(checkpoint)):
        with pytest.raises(CorruptError, match=r"step-00000010 is not complete: metadata.json is missing"):
            reader()


def test_a_run_that_was_set_back_goes_on_from_there_or_from_before(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / run_folder.CHECKPOINTS / run_folder.LATEST).write_text("step-00000020\n")
    first, second = run_folder.checkpoints_to_resume(tmp_path)
    run_folder.point_to(second, [first])
    assert names(tmp_path) == ["damaged-step-00000020", "latest", "step-00000010", "step-00000030"]
    assert run_folder.checkpoints_to_resume(tmp_path) == [second]


def test_the_original_tokenizer_comes_before_its_rewriting(tmp_path: Path) -> None:
    assert run_folder.attached_tokenizer(tmp_path) is None
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).touch()
    assert run_folder.attached_tokenizer(tmp_path) == tmp_path / "tokenizer.model"


@pytest.mark.parametrize("name", ["save_interval", "keep", "mirror_keep"])
def test_numbers_of_checkpoints_are_at_least_1(name: str) -> None:
    assert CheckpointConfig(**{name: 1}).problems() == []
    assert CheckpointConfig(**{name: 0}).problems() == [f"checkpoint.{name} is 0; it must be at least 1, or null"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("runs/mirror", "must be a folder's URL"),
        ("simplecache::s3://bucket/run", "must be a folder's URL"),
        ("sftp://user:secret@host/run", "holds a password"),
        ("s3://key:sec/ret@bucket/run", "holds a password"),
    ],
)
def test_a_wrong_url_is_told_without_its_password(url: str, reason: str) -> None:
    (problem,) = CheckpointConfig(mirror=url).problems()
    assert reason in problem and "ret" not in problem.partition(";")[0]
