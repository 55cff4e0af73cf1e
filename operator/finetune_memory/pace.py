"""The seconds of an optimizer step, from the device's published peak rates and the shares of these that training reaches.

Matrix products and attention are bound by their operations, everything else by the bytes that it reads and writes. Kernels run
one after the other, so their times add up; collectives run at the same time as kernels, so the longer of the two times decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.api.training import ActivationCheckpointing
from finetune_job.plan.element_types import VALUE_BYTES, Elements, resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.devices import ASSUMED, NETWORK_BYTES_PER_SECOND, Calibration, Device, device_of, has_bfloat16
from finetune_memory.layers import Layer, Linear, read_layers
from finetune_memory.limit import MemoryLimit
from finetune_memory.loss import head_of
from finetune_memory.model_shape import LINEAR, ModelShape
from finetune_memory.verdict import workload

HOW_TO_NAME = "give --gpu a name such as H100, or set gpu.product in the profile"

FROZEN_PRODUCTS, TRAINED_PRODUCTS = 2, 3
"""Products with each weight: forward pass and gradient of the input; if the weight is trained, also its own gradient."""
FORWARD_OF_ATTENTION, BACKWARD_OF_ATTENTION = 2, 5
"""Number of attention's products over all pairs of tokens; fused attention recomputes the scores in its backward pass."""
SCORE_BYTES = 40
"""Bytes that eager attention reads and writes for each score, forward and backward."""
ELEMENTWISE_BYTES, COMPILED_BYTES = 36, 10
"""Bytes that norms, rotation, activations and sums read and write for each output value of a layer's linear layers."""
LOGIT_BYTES = 34
"""Bytes read and written for each logit: the product's result, its float32 copy, softmax, and both gradients."""
ADAMW_BYTES = 28
"""Bytes read and written for each trained value: weight, gradient and two moments, in float32."""


@dataclass(frozen=True)
class TimeTerm:
    """One line in the table of times."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class StepTime:
    """The time of one rank's optimizer step; all ranks compute at the same time."""

    device: Device
    calibration: Calibration
    terms: tuple[TimeTerm, ...]
    """Time spent in kernels."""
    link_seconds: float
    """Time spent in collectives."""
    tokens: int
    """Number of tokens that all ranks process in a step."""
    ranks: int

    @property
    def kernel_seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def step_seconds(self) -> float:
        return max(self.kernel_seconds, self.link_seconds)

    @property
    def bound(self) -> str:
        """A description of what limits the speed."""
        return "the device's kernels" if self.kernel_seconds >= self.link_seconds else "the links between devices"

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.ranks


class UnknownPaceError(Exception):
    """No time can be calculated; the message says why, and what would help."""


def calculated_pace(
    plan: RunPlan, shape: ModelShape, stored: str, product: str | None, calibration: Calibration = ASSUMED
) -> StepTime:
    """Calculate the time of a step with full rows, for a plan without open choices. Raises UnknownPaceError.

    stored: element type of the base model's files. product: name of the device, if it is known.
    """
    if product is None:
        raise UnknownPaceError(f"no GPU is named, and time is calculated only for GPUs: {HOW_TO_NAME}")
    device = device_of(product)
    if device is None:
        raise UnknownPaceError(f"no peak rates of {product!r} are known, as for a part of a device: {HOW_TO_NAME}")
    elements = resolve_elements(plan, stored)
    if elements.computed == "float32":
        raise UnknownPaceError("the job computes in float32, and the known peaks of devices are for 16 bits")
    if elements.computed == "bfloat16" and not has_bfloat16(product):
        raise UnknownPaceError(f"{product} has no matrix units for bfloat16, and the peaks of its other units are not known")
    if plan.parallelism.fsdp.offload_params:
        raise UnknownPaceError("fsdp.offloadParams moves weights over a bus whose speed is not known")
    pacer = _Pacer(plan, shape, elements, device, calibration)
    if not pacer.layers:
        raise UnknownPaceError("the planner finds no layers by the names of the model's parameters")
    return pacer.pace()


def run_steps(plan: RunPlan, tokens: int | None) -> int | None:
    """Count the optimizer steps of the run; None if it is bounded by epochs and the number of the data's tokens is unknown."""
    training = plan.training
    if training.max_steps is not None:
        return training.max_steps
    if tokens is None or training.epochs is None:
        return None
    sequences = math.ceil(tokens / plan.data.max_sequence_length)
    return max(math.ceil(training.epochs * sequences / training.global_batch_size), 1)


class _Pacer:
    def __init__(self, plan: RunPlan, shape: ModelShape, elements: Elements, device: Device, calibration: Calibration) -> None:
        self.plan, self.shape, self.elements, self.device, self.calibration = plan, shape, elements, device, calibration
        self.work = workload(plan, MemoryLimit(0, is_device=True, source=device.name))
        self.layers: Sequence[Layer] = read_layers(shape)
        self.linears = [linear for layer in self.layers for linear in layer.linears]
        recomputed = plan.training.activation_checkpointing
        self.is_recomputed = recomputed is not ActivationCheckpointing.NONE
        self.products_again = int(recomputed is ActivationCheckpointing.FULL)
        self.memory = device.memory * calibration.memory

    def pace(self) -> StepTime:
        plan, facts, work = self.plan, self.shape.facts, self.work
        ranks, passes = plan.parallelism.world_size, plan.training.gradient_accumulation_steps
        attention = plan.model.attention
        if attention is Attention.SDPA and not facts.has_fused_attention:
            attention = Attention.EAGER
        memory, adapters = self.memory, sum(map(self._adapter_bytes, self.linears))
        outputs: float = sum(linear.outputs for linear in self.linears)
        for stack in (stack for layer in self.layers for stack in layer.experts):
            outputs += facts.experts_per_token * stack.numel / (stack.shape[0] * facts.hidden_size)
        per_output = COMPILED_BYTES if plan.training.compile else ELEMENTWISE_BYTES
        elementwise = work.tokens * outputs * per_output * (4 / 3 if self.is_recomputed else 1)
        # Packed values are read, and written unpacked, before each product.
        packing = plan.method.quantization
        values = sum(linear.inputs * linear.outputs for linear in self.linears if not linear.is_trained)
        per_value = 0.0 if packing is None else packing.bits / 8 + self.elements.product
        unpacked = self._times(is_trained=False) * values * per_value
        by_peft, fused = "by PEFT's layers", "fused with the base's products"
        logits_bytes = work.tokens * facts.vocabulary_size * LOGIT_BYTES * (2 if facts.has_whole_logits else 1)
        pairs = "all pairs of tokens, and a mask" if work.has_mask else "half of all pairs of tokens"
        terms = (
            TimeTerm("matrix products", passes * self._products(), f"{work.rows} x {work.length:,} tokens a micro-batch"),
            TimeTerm("attention", passes * self._attention(attention), f"{attention.value}: {pairs}, each row one document"),
            TimeTerm("adapters", passes * adapters / memory, fused if plan.method.is_fused else by_peft),
            TimeTerm("unpacking", passes * unpacked / memory, "4-bit weights, before each product"),
            TimeTerm("elementwise", passes * elementwise / memory, "norms, rotation, activation, sums"),
            TimeTerm("logits and loss", passes * logits_bytes / memory, f"vocabulary of {facts.vocabulary_size:,}"),
            TimeTerm("optimizer", self.shape.num_trained / ranks * ADAMW_BYTES / memory, "weights, gradients and moments"),
        )
        return StepTime(
            device=self.device,
            calibration=self.calibration,
            terms=tuple(term for term in terms if term.seconds),
            link_seconds=self._link_seconds(passes) if ranks > 1 else 0.0,
            tokens=work.tokens * passes * ranks,
            ranks=ranks,
        )

    def _times(self, *, is_trained: bool) -> int:
        return (TRAINED_PRODUCTS if is_trained else FROZEN_PRODUCTS) + self.products_again

    def _products(self) -> float:
        """Return the seconds of the products with all layers' own weights and with the output head."""
        values = sum(linear.inputs * linear.outputs * self._times(is_trained=linear.is_trained) for linear in self.linears)
        for layer in self.layers:
            for stack in layer.experts:
                times = self._times(is_trained=stack.is_trained or layer.expert_factors > 0)
                values += self.shape.facts.experts_per_token * stack.numel // stack.shape[0] * times
        head = head_of(self.shape)
        if head is not None:
            again = int(self.shape.facts.has_whole_logits)
            values += head.numel * ((TRAINED_PRODUCTS if head.is_trained else FROZEN_PRODUCTS) + again)
        return 2 * self.work.tokens * values / (self.device.flops * self.calibration.flops)

    def _attention(self, kind: Attention) -> float:
        """Return attention's seconds in all layers. A mask makes it score all pairs of a row's tokens instead of half."""
        facts, work = self.shape.facts, self.work
        products = FORWARD_OF_ATTENTION * (1 + self.products_again) + BACKWARD_OF_ATTENTION
        pairs = len(self.layers) * work.rows * work.length**2 * (1.0 if work.has_mask else 0.5)
        width = facts.num_heads * (facts.head_size + facts.value_head_size) / 2
        seconds = 2 * products * pairs * width / (self.device.flops * self.calibration.attention)
        scores = pairs * facts.num_heads if kind is Attention.EAGER else 0
        return seconds + scores * SCORE_BYTES / self.memory

    def _adapter_bytes(self, linear: Linear) -> float:
        """Return the bytes that LoRA's two small products read and write; their operations take almost no time in comparison.

        The forward pass reads the input and adds to the result; the backward pass reads the gradient twice and the input once,
        and adds to the input's gradient. PEFT's own layers use further kernels to scale and add.
        """
        of_outputs = 4 if self.plan.method.is_fused else 11
        moved = 6 * linear.inputs + of_outputs * linear.outputs
        return self.work.tokens * moved * self.elements.product if linear.rank else 0.0

    def _link_seconds(self, passes: int) -> float:
        """Return the seconds of all all-gathers and of the reduction of gradients."""
        plan, ranks, packing = self.plan, self.plan.parallelism.world_size, self.plan.method.quantization
        cast = self.elements.param if self.elements.casts_parameters else None
        gathered = 0.0
        for parameter in self.shape.parameters:
            is_packed = parameter.kind in LINEAR and not parameter.is_trained
            size = packing.bits / 8 if packing is not None and is_packed else VALUE_BYTES[cast or parameter.dtype]
            gathered += parameter.numel * size
        gathers = 1 if plan.parallelism.fsdp.version == 2 and plan.parallelism.fsdp.reshard_after_forward is False else 2
        reduced = self.shape.num_trained * VALUE_BYTES[self.elements.reduce or "float32"]
        sent = gathered * gathers * passes + reduced * (1 if plan.method.trains_adapter else passes)
        peak = self.device.link if plan.parallelism.nodes == 1 else min(self.device.link, NETWORK_BYTES_PER_SECOND)
        return (ranks - 1) / ranks * sent / (peak * self.calibration.link)
