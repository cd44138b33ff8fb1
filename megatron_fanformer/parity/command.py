"""Runs `megatron-fanformer parity`: compares, prints, writes, and reports the differences."""

from megatron_fanformer.durable_files import file_problems, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.parity.config import read_layouts
from megatron_fanformer.parity.verb import ParityConfig
from megatron_fanformer.terminal import phases, show


def parity(config: ParityConfig) -> None:
    """Compare layouts, print the table, and write the report.

    Raises:
        InputError: the configuration, a layout or the report's folder is wrong.
        DivergenceError: a layout does not compute the same model.
    """
    if found := file_problems(report=config.report):
        raise InputError("\n".join(found))
    run, named = read_layouts(config)
    from megatron_fanformer.runtime import megatron_cpu  # imports torch, so after errors are reported

    megatron_cpu.install()
    from megatron_fanformer.parity.report import as_json, report_lines
    from megatron_fanformer.parity.run import run_layouts

    with phases("starting ranks") as report:
        result = run_layouts(config, run, named, report=lambda name: report(f"training: {name}"))
    show(report_lines(result))
    if config.report is not None:
        write_atomically(config.report, as_json(result, str(config.file)))
    result.check()
