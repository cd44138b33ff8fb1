"""`prepare --hold-out N`: two preparations of one command, of which one is for validation.

The input files are shared as `--lists N` shares them. The last share goes to PREFIX-validation, all others to PREFIX.
"""

import shlex
from dataclasses import replace

from megatron_fanformer.errors import InputError
from megatron_fanformer.preparation.inputs import TEXT_KINDS
from megatron_fanformer.preparation.lists import is_begun, list_prefix, share_files
from megatron_fanformer.preparation.prepare import check_output, input_files, prepare
from megatron_fanformer.preparation.progress import progress_line
from megatron_fanformer.preparation.verb import PrepareConfig
from megatron_fanformer.terminal import plural, show


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
    held = set(share_files(files, parts)[-1].files)
    both = [
        ("validation", list_prefix(config.output, "validation"), [file for file in files if file in held]),
        ("training", config.output, [file for file in files if file not in held]),
    ]
    # What stands comes first: if it is of other inputs, it is refused before anything is written beside it.
    both.sort(key=lambda each: not is_begun(each[1]))
    for name, output, its_files in both:
        show([f"{name}: {len(its_files):,} of {plural(len(files), 'file')}, to {output}"])
        with progress_line(name) as listener:
            report = prepare(replace(config, output=output), listener, files=its_files)
        show(f"{name}: {line}" for line in report.lines())
