"""How software and machines of published runs differ from this project's on GPUs, by source.

A column of the file states a difference for a row. If the column is missing or empty, the table here decides, which
follows the documentation or the recipes of the source's software. Other sources are taken to do as this project does.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.machines import Machine

TRUTHS = {"True": True, "False": False}


@dataclass(frozen=True, kw_only=True)
class Practice:
    """How a source's runs are carried out."""

    tp_overlap: bool = False
    """Whether collectives of tensor parallel ranks overlap with matrix products (user buffers)."""
    dp_overlap: bool = True
    """Whether gradients are reduced during backward, and weights gathered during forward."""
    flash: bool = True
    """Whether flash attention is used; otherwise scores are kept in memory."""
    sp: bool = True
    """Whether tensor parallelism implies sequence parallelism."""
    sp_in_full: bool = True
    """Whether it does so also if whole layers are recomputed."""
    fused_loss: bool = False
    """Whether one kernel computes the cross entropy, in place of float32 operations."""
    fp8_recipe: str = "tensorwise"
    """The recipe that a row's `fp8` means."""
    sums_in_fp32: bool = True
    """Whether replicas reduce gradients in float32; otherwise in bf16."""
    states_batches: bool = True
    """Whether the source states micro batch and interleaving; otherwise the file has 1 in their place."""
    other_machine: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Fields of `Machine` that the source states otherwise, by chip."""

    def of_row(self, values: Mapping[str, str], where: str) -> "Practice":
        """Return this practice, changed as a row's columns state.

        Raises:
            InputError: a column is not True, False or empty.
        """
        stated = {name: values[name] for name in COLUMNS if values.get(name)}
        if values["rec"] == "full" and not self.sp_in_full:
            stated = {"sp": "False", **stated}
        for name, value in stated.items():
            if value not in TRUTHS:
                raise InputError(f"{where}: {name} is {value!r}; it must be True, False or empty")
        return dataclasses.replace(self, **{name: TRUTHS[value] for name, value in stated.items()})

    def machine(self, gpu: str, machine: Machine) -> Machine:
        """Return the chip with the values that the source states."""
        return dataclasses.replace(machine, **self.other_machine.get(gpu, {}))  # type: ignore[arg-type]


# FlashAttention-2, which PyTorch has, reaches 35% of an H100's rate (Shah et al. 2024, FlashAttention-3, abstract).
FLASH_2 = {"attention_efficiency": 0.35}
COLUMNS = ("tp_overlap", "dp_overlap", "flash", "sp", "fused_loss")

SOURCES = {  # by the beginning of the source's name; the longest matching one counts
    # Korthikanti et al. 2022, table 5: full recomputation without sequence parallelism, selective with it.
    "korthikanti": Practice(flash=False, dp_overlap=False, sp_in_full=False),
    # github.com/NVIDIA/Megatron-LM, README of core_r0.8.0: --tp-comm-overlap, --overlap-grad-reduce,
    # --overlap-param-gather; gradients accumulated and reduced in float32.
    "megatron": Practice(tp_overlap=True, states_batches=False),
    # docs.nvidia.com/nemo-framework, performance summaries of 24.07, 24.12, 25.02, 25.04, 25.07: recipes for throughput
    # turn user buffers on; gradients are reduced in bf16. From 25.02 on scales are of the present step.
    "nemo24": Practice(tp_overlap=True, fp8_recipe="delayed"),
    "nemo": Practice(tp_overlap=True, fused_loss=True, sums_in_fp32=False),
    # docs.nvidia.com/nemo/megatron-bridge, performance summary and its archive; github.com/NVIDIA-NeMo/Megatron-Bridge,
    # scripts/performance (grad_reduce_in_fp32 is off) and pull request 3107 (fine-tuning).
    "bridge": Practice(tp_overlap=True, fused_loss=True, sums_in_fp32=False),
    # github.com/NVIDIA/dgxc-benchmarking, llama3.1 and nemotron: NeMo 24.09 and 25.04.
    "dgxc24": Practice(tp_overlap=True, fused_loss=True, fp8_recipe="delayed", sums_in_fp32=False),
    "dgxc": Practice(tp_overlap=True, fused_loss=True, sums_in_fp32=False),
    # SimuMax v1.2, its guide to the B200's runs: everything that overlaps is off, the cross entropy is fused.
    "simumax": Practice(dp_overlap=False, fused_loss=True),
    # github.com/huggingface/nanotron: ZeRO-1, gradients in float32.
    "nanotron": Practice(other_machine={"h100": FLASH_2}),
}


def practice_of(source: str) -> Practice:
    """Return the practice of a source."""
    known = max((name for name in SOURCES if source.startswith(name)), key=len, default=None)
    return SOURCES[known] if known else Practice()
