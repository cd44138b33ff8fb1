"""Leave-Square-Out of fine-tuned checkpoints: answers of several tokens, scored; and a checkpoint asked by the verb."""

import math
from pathlib import Path

import pytest
import torch

from megatron_fanformer.cli import main
from megatron_fanformer.data.chat_template import encode_chat, find_template
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.experiments.probes.fine_tuned_holes import answered
from megatron_fanformer.experiments.probes.hole_pairs import all_pairs, conversation
from megatron_fanformer.experiments.probes.settings import HolesSettings
from megatron_fanformer.experiments.result import read_result
from tests.generation.making import write_export, write_tokenizer

VOCAB_SIZE = 600


class Planted:
    """Logits that follow from the two tokens before, but for those of conversations that it knows by heart."""

    def __init__(self, known):
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        self.known = {tuple(ids[:place].tolist()): int(ids[place]) for ids in known for place in range(1, len(ids))}

    def logits(self, ids_bs):
        logits_bsv = self.table[ids_bs] + 0.5 * self.table[ids_bs.roll(1, 1)]
        for row, ids in enumerate(ids_bs.tolist()):
            for place in range(len(ids)):
                if (message := self.known.get(tuple(ids[: place + 1]))) is not None:
                    logits_bsv[row, place, message] = 1e4
        return logits_bsv


@pytest.fixture
def rows(small_tokenizer_file):
    """Conversations of one to three digits an answer, of several lengths."""
    template, tokenizer = find_template(small_tokenizer_file, "olmo"), load_tokenizer(small_tokenizer_file)
    pairs = all_pairs("linear", 10)
    return [encode_chat(tokenizer, template.render(conversation(pairs, "linear", n))) for n in range(0, 12_000, 997)]


def test_an_answer_is_all_its_tokens_and_the_end_of_text(rows):
    model, temperature = Planted([]), 0.5
    probability, right = answered(model, rows, temperature)
    assert len({len(ids) for ids, _ in rows}) > 1
    assert not right.any()
    for (ids, learned), found in zip(rows, probability.tolist(), strict=True):
        expected = 1.0
        for place in range(1, len(ids)):
            if learned[place]:
                weights = (model.logits(torch.tensor(ids[None, :place]))[0, -1].double() / temperature).exp()
                expected *= (weights[ids[place]] / weights.sum()).item()
        assert learned.sum() > 1 and math.isclose(found, expected, rel_tol=1e-9)


def test_a_model_knows_what_it_knows_whole(rows):
    """Of the last one all but the end of text: the answer goes on then, and is another."""
    known = [ids for ids, _ in rows[::2]]
    last, learned = rows[1]
    end = int(learned.nonzero()[0][-1])
    probability, right = answered(Planted([*known, last[:end]]), rows, 0.5)
    assert right.tolist() == [place % 2 == 0 for place in range(len(rows))]
    assert probability[::2].tolist() == [1.0] * len(known)
    assert probability[1] < 0.1


@pytest.mark.full
def test_a_checkpoint_is_asked_by_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exports = [str(tmp_path / name) for name in ("with-a-template", "without-one")]
    tokenizer = write_tokenizer(tmp_path)
    for folder, template in zip(
        exports, ("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", None), strict=True
    ):
        write_export(Path(folder), "fanformer-tied", tokenizer, template)
    command = ["experiment", "holes", "--holes.tasks", "[modular]", "--output", str(tmp_path / "holes")]
    assert main([*command, "--checkpoint", exports[0], "--checkpoint", exports[1]]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main([*command, "--checkpoint", exports[0]]) == 0
    result = read_result(tmp_path / "holes")
    assert [finding.shows for finding in result.findings] == [None]
    assert result.settings.keys() == set(HolesSettings.OF_CHECKPOINTS)
    assert (tmp_path / "holes" / "holes-modular.png").read_bytes().startswith(b"\x89PNG")
