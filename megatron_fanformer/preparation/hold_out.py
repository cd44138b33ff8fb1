"""`prepare --hold-out N`: two preparations of one command, of which one is for validation.

The input files are shared in N parts, about equal in bytes of text. The last goes to PREFIX-validation, all others to
PREFIX.
"""

import heapq
import shlex
from collections.abc import Sequence
from dataclasses import replace

from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.inputs import COMPRESSIONS, TEXT_KINDS, InputFile, recorded_path
from megatron_fanformer.preparation.prepare import check_output, input_files, prepare
from megatron_fanformer.preparation.progress import progress_line
from megatron_fanformer.preparation.remote_outputs import output_manifest
from megatron_fanformer.preparation.verb import PrepareConfig
from megatron_fanformer.preparation.work_folder import folder_path
from megatron_fanformer.terminal import plural, show

COMPRESSED_WEIGHT = 2.5
"""Bytes of text in a byte of a compressed file: 2.3 to 2.9 of Dolma's sample documents and this project's pages."""


def prepare_both(config: PrepareConfig, parts: int) -> None:
    """Prepare the last of `parts` shares of the inputs, and then the others, each as a preparation of its own.

    Training comes last, so that validation is complete where PREFIX is.

    Raises InputError for fewer files than parts, an output that is no prefix, and like `prepare`.
    """
    if parts < 2:
        raise InputError(f"--hold-out is {parts}; it must be at least 2, a part for validation and one for training")
    check_output(config.output)
    files = input_files(config)
    if len(files) < parts:
        remedies = ["give more files"]
        if len(files) > 1:
            remedies.append("a smaller number")
        only = files[0] if len(files) == 1 and files[0].name.endswith(TEXT_KINDS) else None
        if only is not None:  # one document, of which data.split cuts none either
            command = f"split -n l/20 --additional-suffix={only.suffix} {shlex.quote(str(only))} parts/"
            remedies.append(f"cut it by mkdir parts && {command}, and prepare parts")
        elif config.format == "megatron" and not config.chat:
            remedies.append("leave it out and set data.split for the run")
        problem = f"--hold-out is {parts}, more than the files given ({len(files)}), which are not cut"
        raise InputError(f"{problem}; {', or '.join(remedies)}")
    held = set(last_share(files, parts))
    both = [
        ("validation", f"{config.output}-validation", [file for file in files if file in held]),
        ("training", config.output, [file for file in files if file not in held]),
    ]
    # An output that stands comes first: if it is of other inputs, it is refused before anything is written beside it.
    both.sort(key=lambda one: output_manifest(one[1]) is None and not folder_path(one[1]).exists())
    for name, output, files_of_it in both:
        show([f"{name}: {len(files_of_it):,} of {plural(len(files), 'file')}, to {output}"])
        with progress_line(name) as listener:
            report = prepare(replace(config, output=output), listener, files=files_of_it)
        show(f"{name}: {line}" for line in report.lines())


def last_share(files: Sequence[InputFile], parts: int) -> list[InputFile]:
    """Return the last share of files, which are shared about equally by bytes of text.

    The largest file goes first, each to the share that has the fewest bytes yet; of equal ones the order of paths and
    of shares decides, so that the same files give the same shares.
    """
    weighed: list[tuple[float, str, InputFile]] = []
    for file in files:
        path = recorded_path(file)
        weight = file.stat().st_size * (COMPRESSED_WEIGHT if path.endswith(tuple(COMPRESSIONS)) else 1.0)
        weighed.append((-weight, path, file))
    shares: list[list[InputFile]] = [[] for _ in range(parts)]
    lightest = [(0.0, 0, place) for place in range(parts)]  # weight, files, share
    for minus_weight, _, file in sorted(weighed, key=lambda one: one[:2]):
        weight, _, place = heapq.heappop(lightest)
        shares[place].append(file)
        heapq.heappush(lightest, (weight - minus_weight, len(shares[place]), place))
    return shares[-1]
