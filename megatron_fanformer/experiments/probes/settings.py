"""Settings of the probes, and how long they take. Imports nothing that takes time.

The defaults are the laptop forms, whose minutes stand in `PROBES`; docs/experiments.md has their results. Fields
are set on the command line as --NAME.FIELD VALUE.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

Task = Literal["modular", "linear"]


class Settings:
    """The settings of one probe; each is a frozen dataclass."""

    OF_CHECKPOINTS: ClassVar[tuple[str, ...]] = ()
    """The fields that count where trained models are measured in place of the probe's own."""

    FROM_ZERO: ClassVar[tuple[str, ...]] = ()
    """The numbers that may be 0."""

    def counting(self) -> dict[str, Any]:
        """Return the fields that count, as plain values: what a result states, and is known by."""
        values = asdict(self)  # type: ignore[call-overload]
        if self.OF_CHECKPOINTS and values["checkpoints"]:
            return {name: values[name] for name in self.OF_CHECKPOINTS}
        return values

    def problems(self) -> list[str]:
        """Return the rules that it breaks, one line each: numbers are counts or rates, lists name each thing once."""
        found = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value <= 0 and field.name not in self.FROM_ZERO:
                found.append(f"{field.name} is {value}; it must be above 0")
            elif isinstance(value, tuple) and len(set(value)) < len(value):
                found.append(f"{field.name} is {list(value)}; name each once")
        return found or list(self._own_problems())

    def _own_problems(self) -> Iterator[str]:
        """Return the problems that this probe alone can have, where each number is valid by itself."""
        yield from ()


@dataclass(frozen=True, kw_only=True)
class LipschitzSettings(Settings):
    """Models at random weights that spread two near inputs, as the authors' notebook has it."""

    seeds: int = 1
    """Draws of weights and inputs: 0 is the notebook's."""
    depths: tuple[int, ...] = (1, 2, 4)
    """Layers; the notebook goes on with 8, 12, 16, 24, … 196. Its random numbers run through them in order."""
    hidden_size: int = 512
    """Width, of the convolutions too."""
    num_heads: int = 8
    """Attention heads."""
    samples: int = 10
    """Inputs; the constant is the largest of theirs."""
    grid: int = 32
    """Each input is a grid of this many points a side."""
    attention: Literal["heads", "points"] = "heads"
    """What attention runs over: the heads of one point, as in the notebook, or all points."""
    epsilon: float = 1e-7
    """Standard deviation of the difference of the two inputs."""

    def _own_problems(self) -> Iterator[str]:
        if not self.depths or min(self.depths) < 1 or list(self.depths) != sorted(self.depths):
            yield f"depths is {list(self.depths)}; name numbers of layers from 1 on, in order"
        if self.hidden_size % (4 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of four times num_heads {self.num_heads}"


@dataclass(frozen=True, kw_only=True)
class ModSettings(Settings):
    """The fit of t mod 5 (fig. 1a): controls on t as it is, and language models' layers on it."""

    seeds: int = 3
    """Seeds of the weights and the samples; every model has the same ones."""
    half_range: float = 100.0
    """Controls train on t within ± this; as far again on both sides is outside."""
    control_size: int = 128
    """Width of the FAN network; the MLP has as many parameters."""
    control_steps: int = 4000
    """AdamW steps of the controls, each on `batch_size` new samples."""
    control_rate: float = 3e-3
    """The learning rate of the controls at the start; it falls to 0 by a cosine."""
    model_half_range: float = 20.0
    """The same range for the Transformer and the FANformer."""
    model_scale: float = 0.25
    """Factor that multiplies t before it enters them."""
    model_layers: int = 2
    """Layers of the Transformer and the FANformer."""
    model_size: int = 64
    """Their hidden size; the FANformer has the Transformer's number of parameters."""
    model_steps: int = 1000
    """Their AdamW steps."""
    model_rate: float = 1e-3
    """Their learning rate at the start."""
    batch_size: int = 256
    """Samples per step."""


@dataclass(frozen=True, kw_only=True)
class HolesSettings(Settings):
    """Leave-Square-Out: arithmetic on pairs of numbers, with a square of them left out of the training."""

    OF_CHECKPOINTS = ("checkpoints", "tasks", "half_side", "temperature")
    FROM_ZERO = ("cooldown",)

    seeds: int = 5
    """Seeds of the weights and of the order of samples; both architectures have the same ones."""
    tasks: tuple[Task, ...] = ("modular", "linear")
    """`modular`: (a + b) mod 113, the hole centred at (56, 56); `linear`: a + 2 b + 3, centred at (50, 50)."""
    weight_decays: tuple[float, ...] = (0.0, 1.0)
    """AdamW's weight decays to try, each on all weights."""
    half_side: int = 10
    """The hole has 2 · half_side + 1 numbers a side: 441 pairs, which leaves 12,328."""
    num_layers: int = 1
    """Layers."""
    hidden_size: int = 128
    """Width; the FANformer has the Transformer's number of parameters."""
    num_heads: int = 4
    """Attention heads."""
    batch_size: int = 512
    """Pairs per step."""
    steps: int = 4000
    """AdamW steps: 500 epochs are 12,000."""
    learning_rate: float = 1e-3
    """Learning rate after a warm-up over the first hundredth of the steps."""
    cooldown: float = 0.25
    """Share of the steps, at the end, over which the learning rate falls to 0; 0 keeps it. With weight decay FANformers
    do not settle without it."""
    temperature: float = 0.5
    """Temperature at which the probability of the right answer is computed."""
    checkpoints: tuple[str, ...] = ()
    """Models fine-tuned on the conversations of --write-data, to be evaluated; none is trained then."""

    def _own_problems(self) -> Iterator[str]:
        if not self.tasks:
            yield "tasks is empty; name modular, linear or both"
        if not self.weight_decays or min(self.weight_decays) < 0:
            yield f"weight_decays is {list(self.weight_decays)}; name numbers from 0 on"
        if not 0 <= self.cooldown <= 1:
            yield f"cooldown is {self.cooldown}; it must lie in [0, 1], a share of the steps"
        if self.half_side > 50:
            yield f"half_side is {self.half_side}; it must be at most 50, so that the hole lies within the pairs"
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of twice num_heads {self.num_heads}"


@dataclass(frozen=True, kw_only=True)
class CostSettings(Settings):
    """The cost of a FANformer beside its Transformer: parameters, FLOPs, memory."""

    presets: tuple[str, ...] = ("fanformer-300m", "fanformer-1b", "fanformer-7b")
    """The paper's sizes, by their names in configurations."""
    sequence_length: int = 2048
    """Tokens of a sequence, for FLOPs a token."""
    inference_length: int = 4096
    """Tokens of the sequence whose memory is counted, one at a time in half precision, as in the paper's table."""

    def _own_problems(self) -> Iterator[str]:
        if not self.presets:
            yield "presets is empty; name sizes, such as fanformer-1b"


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(Settings):
    """Seconds and memory of prefill and decoding, of a FANformer and its two twins in turns."""

    preset: str | None = None
    """One of the paper's sizes (the paper: fanformer-1b); null: the sizes below."""
    num_layers: int = 8
    """Layers."""
    hidden_size: int = 512
    """Width."""
    num_heads: int = 8
    """Attention heads."""
    vocab_size: int = 8192
    """Token ids."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of weights and activations: bf16 on a GPU, fp32 on a CPU; the paper has fp16."""
    prompt_tokens: int = 512
    """Tokens of the prefill (the paper: 4096)."""
    new_tokens: int = 32
    """Tokens to decode, one at a time."""
    batch_size: int = 1
    """Sequences at once (the paper: 1)."""
    rounds: int = 10
    """Rounds of measurement; in each, all three models take a turn, in another order."""

    def _own_problems(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size is {self.hidden_size}; it must be a multiple of twice num_heads {self.num_heads}"


class Probe(NamedTuple):
    """A line of the verb's list."""

    about: str
    minutes: str
    """Minutes with the defaults: measured on one core of a machine in use (lipschitz, mod, cost), estimated for the
    others."""
    settings: type[Any]


PROBES: dict[str, Probe] = {
    "lipschitz": Probe("how far near inputs spread, by depth: the authors' notebook", "6", LipschitzSettings),
    "mod": Probe("the fit of t mod 5 (fig. 1a), with a FAN network and an MLP as controls", "14", ModSettings),
    "holes": Probe("arithmetic beside a square that is never trained on", "150", HolesSettings),
    "cost": Probe("parameters, FLOPs and memory beside the paper's table, by formula and counted", "1", CostSettings),
    "inference": Probe("prefill and decoding, a FANformer and its two twins in turns", "3", InferenceSettings),
}
