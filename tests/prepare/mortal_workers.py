"""Workers of `prepare` that are killed while they encode the first file, as often as a file beside it says."""

import os
import signal
from pathlib import Path

from megatron_fanformer.prepare import pipeline
from megatron_fanformer.prepare.encoded_inputs import EncodedRecord

DEATHS = "deaths"
encode_file = pipeline.encode_file


def encode_or_die(number: int) -> EncodedRecord:
    """In place of `encode_file`."""
    path = pipeline._encoder.job.files[number]
    assert isinstance(path, Path)
    left = int((deaths := path.with_name(DEATHS)).read_text())
    if left and number == 0:
        deaths.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_file(number)
