"""The file of metrics: what a resumed run keeps of it."""

import json
import logging
from pathlib import Path

import pytest

from megatron_fanformer.inspection.checkpoint import last_metrics
from megatron_fanformer.training.metrics import METRICS, MetricsWriter, read_metrics

FOREIGN = [b"", b"\xff\xfe\x00 not text", b"[1, 2]", b"7", b'{"step": "8"}', b'{"steps": 1}', b"[" * 100_000, b"null"]


def test_a_resume_drops_later_steps_and_keeps_what_no_run_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [json.dumps({"step": step, "loss": step / 2}).encode() for step in (1, 2, 3)]
    file = tmp_path / METRICS
    file.write_bytes(b"\n".join([steps[0], *FOREIGN, *steps[1:], b'{"step": 1']))
    with caplog.at_level(logging.WARNING, "megatron_fanformer"):
        writer = MetricsWriter(tmp_path, first_step=3, tensorboard=False)
    assert f"{file}: line 2 is not a step's metrics" in caplog.text
    writer.write(3, {"loss": 4.0})
    writer.close()
    assert file.read_bytes().split(b"\n")[:-2] == [steps[0], *FOREIGN, steps[1]]
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 4.0}]
    with file.open("ab") as stream:
        stream.write(b"\x00\n[]\ntorn")
    assert last_metrics(tmp_path) == {"step": 3, "loss": 4.0}


def test_a_file_that_is_removed_during_a_run_is_written_anew(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=1, tensorboard=False)
    writer.write(1, {})
    (tmp_path / METRICS).unlink()
    writer.write(2, {})
    assert read_metrics(tmp_path) == [{"step": 2}]
