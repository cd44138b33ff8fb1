"""Machines: data-sheet rates of chips and the links between them, and the shares of them that runs reached.

`machines.yaml` holds the known ones, with the source of each figure. A file of the same form stands for any other
machine; `tools/bench_train.py --json` writes one of its measurements.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.configuration import build, read_plain_values
from megatron_fanformer.errors import InputError

KNOWN_MACHINES = Path(__file__).with_name("machines.yaml")
LIKE = "like"  # the key of a file that names the known machine whose figures hold where the file has none
LINKS = ("domain", "network")
DRIVERS_SHARE = 0.01  # the share of a chip's memory that CUDA does not give to programs: an assumption
MEASURED = "machine"  # the key under which a report of tools/bench_train.py has its machine
MAY_BE_ZERO = ("_seconds", "overlap", "relative_error")  # endings of fields' names
SHARES = ("efficiency", "overlap")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link from one chip to others."""

    bytes_per_second: float  # of one chip in one direction, by the data sheet
    efficiency: float  # the share of that rate that collectives reach

    @property
    def rate(self) -> float:
        """Return the bytes per second that collectives reach."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One chip of many equal ones, and how they are connected; rates are those of data sheets."""

    name: str
    memory_bytes: int  # of one chip, as its driver reports it; programs get `usable_bytes`
    # FLOP/s of dense matrix products in each number format; null: the chip has no such products, or nobody knows.
    fp32_flops_per_second: float | None = None
    bf16_flops_per_second: float | None = None
    fp8_flops_per_second: float | None = None
    has_mxfp8: bool = False  # whether FP8 hardware scales blocks of 32 numbers, as the recipe mxfp8 needs (Blackwell)
    product_efficiency: float  # the share of the fp32 or bf16 rate that large matrix products reach
    fp8_product_efficiency: float = 1.0
    attention_efficiency: float  # the share of the rate in the activations' format that flash attention's kernels reach
    memory_bytes_per_second: float
    memory_efficiency: float  # the share of that bandwidth that element-wise kernels reach
    layer_seconds: float  # host time per layer and micro batch, forward and backward: Python, autograd and launches
    step_seconds: float  # host time per step, between the last kernel of one step and the first of the next
    collective_seconds: float  # time to start a collective, whatever its size
    domain_size: int  # chips that `domain` connects, usually those of a node
    domain: Link  # the link within a domain: NVLink
    network: Link  # the link between domains; its rate is that of one chip's own adapter
    overlap: float  # share of a communication that computation hides; less than 1, since both slow each other
    # Relative error of a step's time: nine of ten published runs of each source are within it, predicted without any
    # run of that source; 0 if no run was compared.
    relative_error: float
    fp8_relative_error: float | None = None  # the error of steps in FP8; null: `relative_error`
    fp32_relative_error: float | None = None
    sources: list[str]  # the sources of the figures, one a line
    devices: list[str] = field(default_factory=list)  # torch's names of such a chip, where they identify the chip

    @property
    def memory_rate(self) -> float:
        """Return the bytes per second that element-wise kernels reach."""
        return self.memory_bytes_per_second * self.memory_efficiency

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a program can have."""
        return int((1 - DRIVERS_SHARE) * self.memory_bytes)

    def error_in(self, dtype: str) -> float:
        """Return the relative error of a step's time in fp32, bf16 or fp8; 0 if no run was compared."""
        error = {"fp32": self.fp32_relative_error, "fp8": self.fp8_relative_error}.get(dtype)
        return self.relative_error if error is None else error

    def flops_per_second(self, dtype: str) -> float:
        """Return the FLOP/s of dense products in fp32, bf16 or fp8; raise InputError if the machine states none."""
        if (rate := getattr(self, f"{dtype}_flops_per_second")) is None:
            raise InputError(
                f"the rate of matrix products in {dtype} is not known of {self.name}; change "
                f"precision.{'fp8' if dtype == 'fp8' else 'dtype'}, or give the machine's {dtype}_flops_per_second"
            )
        return rate

    def problems(self) -> Iterator[str]:
        """Yield the rules that these figures break, one line each."""
        links = {f"{link}.{name}": value for link in LINKS for name, value in vars(getattr(self, link)).items()}
        for name, value in {**vars(self), **links}.items():
            if type(value) in (int, float):  # but not bool
                may_be_zero = name.endswith(MAY_BE_ZERO)
                if value < 0 or (value == 0 and not may_be_zero):
                    yield f"machine.{name} is {value}; it must be {'at least' if may_be_zero else 'above'} 0"
                elif value > 1 and name.endswith(SHARES):
                    yield f"machine.{name} is {value}; it must be at most 1"


@functools.cache
def known_machines() -> dict[str, Machine]:
    """Return the machines of this package by their short names."""
    return {name: build_machine(values, name) for name, values in _known_values().items()}


@functools.cache
def _known_values() -> dict[str, dict[str, Any]]:
    return read_plain_values(KNOWN_MACHINES)


def machine_of_device(name: str) -> Machine | None:
    """Return the known machine whose chip torch calls `name`; None if no known machine has that chip."""
    return next((machine for machine in known_machines().values() if name in machine.devices), None)


def load_machine(name_or_file: str) -> Machine:
    """Return the known machine of this name, or the machine that this YAML or JSON file describes.

    A file has the fields of `Machine`, or `like: NAME` and the fields that differ from those of the known machine NAME.

    Raises:
        InputError: there is no such machine or file, or the file describes no machine; one line for each problem.
    """
    if machine := known_machines().get(name_or_file.lower()):
        return machine
    try:
        values = read_plain_values(Path(name_or_file))
    except FileNotFoundError:
        near = difflib.get_close_matches(name_or_file.lower(), known_machines(), n=1, cutoff=0.0)
        raise InputError(
            f"machine {name_or_file!r} is neither known nor a file; did you mean {near[0]}? Known are "
            f"{', '.join(known_machines())}; a file gives the figures of another"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name_or_file} cannot be read as a machine: {error}") from error
    if isinstance(values, Mapping):
        values = values.get(MEASURED, values)  # a report of tools/bench_train.py has its machine under this key
    if not isinstance(values, Mapping):
        raise InputError(f"{name_or_file} holds no fields of a machine, such as name; see docs/planning.md")
    return build_machine(values, name_or_file)


def build_machine(values: Mapping[str, Any], source: str) -> Machine:
    """Build a machine from plain values. `like: NAME` among them supplies the fields, also of links, that they lack.

    Raises InputError if the values describe no machine; every line of the message begins with `source`.
    """
    fields = {key: value for key, value in values.items() if key != LIKE}
    if LIKE in values:
        base = _known_values().get(str(values[LIKE]).lower())
        if base is None:
            raise InputError(f"{source}: {LIKE} is {values[LIKE]!r}; it must be one of {', '.join(_known_values())}")
        links = {key: {**base[key], **fields[key]} for key in LINKS if isinstance(fields.get(key), Mapping)}
        fields = {**base, **fields, **links}
    try:
        machine = build(fields, Machine, "machine.")
        if problems := list(machine.problems()):
            raise InputError("\n".join(problems))
    except InputError as error:
        raise InputError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None
    return machine
