from pathlib import Path

import pytest

from megatron_fanformer.configuration import build, yaml_value
from megatron_fanformer.data.blends import Blend, Source, blend_problems, parse_blend, source_labels, split_bounds
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.errors import InputError

SPLITS = ["99,1,0", "969,30,1", "8,2", ".7,.2,.1", "1,1,1", "999.9,.1", "33.3,33.3,33.4", "50,50,0"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with pairs a and b, and .npy files in a folder of their own."""
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "npy/2.npy", "npy/1.npy", "npy/1.manifest.json", "npy/sub/3.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("items", "sources"),
    [
        (["a", "b"], [("a",), ("b",)]),
        (["npy"], [("npy/1.npy", "npy/2.npy")]),  # sorted
        (["npy/*.npy"], [("npy/1.npy", "npy/2.npy")]),
        (["npy/**/*.npy"], [("npy/1.npy", "npy/2.npy", "npy/sub/3.npy")]),
        # .npy files without weights are one source, in their order
        (["npy/2.npy", "npy/sub", "npy/1.npy"], [("npy/2.npy", "npy/sub/3.npy", "npy/1.npy")]),
        (["a", "npy/2.npy", "b", "npy/1.npy"], [("a",), ("npy/2.npy", "npy/1.npy"), ("b",)]),
    ],
)
def test_without_weights_each_prefix_is_a_source(
    folder: Path, items: list[str], sources: list[tuple[str, ...]]
) -> None:
    assert parse_blend(items) == Blend([Source(paths) for paths in sources], None)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_pair_may_be_named_by_either_file(folder: Path, suffix: str) -> None:
    assert parse_blend(["a" + suffix]).sources == [Source(("a",))]
    (folder / "a").mkdir()
    assert parse_blend(["a"]).sources == [Source(("a",))]  # not the folder
    for name in ("a.bin", "a.idx"):
        (folder / (name + ".idx")).touch()
    assert parse_blend(["a" + suffix]).sources == [Source(("a" + suffix,))]  # a pair of this very name


def test_numbers_are_weights_as_their_text_is(folder: Path) -> None:
    values = yaml_value("[0.7, a, 3, b, 1.5e-3, npy]")
    assert parse_blend(values) == parse_blend(["0.7", "a", "3", "b", "0.0015", "npy"])
    config = build({"train_data": values, "valid_data": {"v": values}}, DataConfig)
    assert config.problems() == [] and config.blend(config.valid_data["v"]) == parse_blend(values)
    for wrong in ("[true, a]", "[.nan, a]", "[a, 0.3]", "[[0.7], a]", "[-1, a]"):
        with pytest.raises(InputError):
            blend = build({"train_data": yaml_value(wrong)}, DataConfig)
            raise InputError("; ".join(blend.problems()) or pytest.fail(wrong))


def test_with_weights_each_goes_with_one_source(folder: Path) -> None:
    blend = parse_blend(["1", "npy", "2", "a", "3", "npy/2.npy"])
    assert blend.weights == [1.0, 2.0, 3.0]
    assert [source.paths for source in blend.sources] == [("npy/1.npy", "npy/2.npy"), ("a",), ("npy/2.npy",)]


def test_a_blend_file_stands_for_its_words(folder: Path) -> None:
    (folder / "npy" / "my.blend").write_text("# made by hand\n0.3 ../a\n0.7\t../b  # the other\n\n2 1.npy 1 /x\n")
    blend = parse_blend(["@npy/my.blend"])
    assert blend.weights == [0.3, 0.7, 2.0, 1.0]
    assert [source.paths[0] for source in blend.sources] == ["npy/../a", "npy/../b", "npy/1.npy", "/x"]


def test_the_short_names_of_sources(folder: Path) -> None:
    """Below the folder of all, however each path is written; whole names where two would be the same."""
    for names, labels in (
        (["tokens/web", "tokens/code/all"], ["web", "code/all"]),
        ([f"{folder}/tokens/web", "tokens/code"], ["web", "code"]),
        (["tokens/web"], ["web"]),
        (["a", "./a"], ["a", "./a"]),
    ):
        assert source_labels([Source((name,)) for name in names]) == labels
    assert source_labels([Source(("x/y/1.npy", "x/z/2.npy")), Source(("x/3.npy",))]) == ["x", "x/3"]


@pytest.mark.parametrize(
    ("text", "items", "message"),
    [
        ("", ["@x.blend"], "the list is empty"),
        ("a 0.5", ["@x.blend"], "'0.5' is a weight"),
        ("0.5 a 0.5", ["@x.blend"], "does not alternate"),
        ("@x.blend", ["@x.blend"], "blend file x.blend names another by @"),
        ("a", ["@y.blend"], "blend file y.blend cannot be read"),
        ("", ["empty"], "empty holds no .npy file"),
        ("", ["none/*.npy"], r"none/\*.npy holds no .npy file"),
        ("", ["none.npy"], "none.npy does not exist; name .npy files"),
        ("", ["npy/1"], "npy/1.bin does not exist; name .npy files, or the prefix of a .bin and .idx pair"),
    ],
)
def test_each_problem_is_named(folder: Path, text: str, items: list[str], message: str) -> None:
    (folder / "empty").mkdir()
    (folder / "x.blend").write_text(text)
    problems = blend_problems("data.train_data", items)
    assert all(line.startswith("data.train_data: ") for line in problems)
    with pytest.raises(InputError, match=message):
        raise InputError("\n".join(problems))


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_cut_as_megatron_cuts_it(split: str) -> None:
    from megatron.core.datasets import blended_megatron_dataset_config as megatron

    shares = megatron.parse_and_normalize_split(split)
    assert split_bounds(split) == megatron.convert_split_vector_to_split_matrix(shares)
