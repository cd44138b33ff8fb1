"""Publication of checkpoints, and finding one's way among them."""

from pathlib import Path

import pytest

from megatron_fanformer.checkpoint import store
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.formats.recognition import find_checkpoint


def save(run: Path, step: int, keep: int | None = None) -> Path:
    folder = store.temporary_folder(run / store.CHECKPOINTS, step)
    (folder / store.MEGATRON_METADATA).write_text("{}")
    return store.publish_checkpoint(folder, run / store.CHECKPOINTS, step, {"step": step}, keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / store.CHECKPOINTS).iterdir())


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert store.latest_checkpoint(tmp_path) is None
    with pytest.raises(InputError, match="of unknown kind"):
        find_checkpoint(tmp_path)


def test_latest_is_the_one_published_last(tmp_path: Path) -> None:
    save(tmp_path, 10)
    last = save(tmp_path, 20)
    assert find_checkpoint(tmp_path) == find_checkpoint(last) == last
    assert store.saved_config(last) == {"step": 20}


def test_a_save_that_was_cut_off_is_never_found_and_goes_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 10)
    store.temporary_folder(tmp_path / store.CHECKPOINTS, 15)
    assert find_checkpoint(tmp_path).name == "step-00000010"
    save(tmp_path, 20)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020"]


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


def test_a_latest_that_names_nothing_is_corrupt(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / store.CHECKPOINTS / store.LATEST).write_text("step-00000011\n")
    with pytest.raises(CorruptError, match="step-00000011"):
        store.latest_checkpoint(tmp_path)


def test_a_configuration_that_states_no_model_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="states no model"):
        store.saved_model(save(tmp_path, 10))


def test_the_original_tokenizer_comes_before_its_rewriting(tmp_path: Path) -> None:
    assert store.attached_tokenizer(tmp_path) is None
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).touch()
    assert store.attached_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
