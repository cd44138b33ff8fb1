"""A plan as a picture: the memory of each stage against the GPU's, and where a step's time goes."""

from typing import Any

from megatron_fanformer.pictures import drawn, use_many_colours
from megatron_fanformer.sizing.estimate import GIB, Estimate


def plan_picture(shown: Estimate) -> bytes:
    """A layout's memory and time, as a PNG."""

    def draw(panels: Any) -> None:
        memory, time = panels[0]
        _draw_memory(shown, memory)
        _draw_time(shown, time)

    title = f"{shown.name} on {shown.job.world_size:,} x {shown.machine.name}: predicted, not measured"
    return drawn(draw, columns=2, widths=(3, 2), title=title)


def _draw_memory(shown: Estimate, axes: Any) -> None:
    stages = [stage.stage for stage in shown.stages]
    purposes = list(dict.fromkeys(line.purpose for stage in shown.stages for line in stage.lines))
    use_many_colours(axes)
    bottom = [0.0] * len(stages)
    for purpose in [*purposes, "reserve"]:
        heights = [
            (shown.reserve_bytes if purpose == "reserve" else sum(x.bytes for x in stage.lines if x.purpose == purpose))
            / GIB
            for stage in shown.stages
        ]
        colour = {"color": "lightgray"} if purpose == "reserve" else {}
        axes.bar(stages, heights, bottom=bottom, label=purpose, **colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.axhline(shown.machine.usable_bytes / GIB, linestyle="--", color="black", label="a GPU's memory")
    axes.set(xlabel="pipeline stage", ylabel="GiB", title="memory of a GPU", xlim=(-0.75, len(stages) - 0.25))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small", bbox_to_anchor=(1.01, 1), loc="upper left")


def _draw_time(shown: Estimate, axes: Any) -> None:
    parts = sorted(((seconds, name) for name, seconds in shown.time.parts.items() if seconds))
    bars = axes.barh([name for _, name in parts], [seconds for seconds, _ in parts])
    axes.bar_label(bars, [f" {seconds / shown.time.seconds:.1%}" for seconds, _ in parts], fontsize="small")
    axes.set_xlim(right=1.25 * parts[-1][0])  # room for the label
    error = f" ± {shown.time.relative_error:.0%}" if shown.time.relative_error else ""
    axes.set(xlabel="seconds", title=f"a step: {shown.time.seconds:.3f} s{error}")
