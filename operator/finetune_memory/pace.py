"""Seconds of an optimizer step: published peaks of the device, times the share of them that training was measured to reach.

Matrix products and attention take their operations, everything else takes the bytes that it reads and writes. Kernels come one
after the other, so their times add up; collectives send while they compute, so the longer of the two decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.api.training import ActivationCheckpointing
from finetune_job.plan.element_types import VALUE_BYTES, Elements, resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.devices import ASSUMED, NETWORK_BYTES_PER_SECOND, Calibration, Device, device_of
from finetune_memory.layers import Layer, Linear, read_layers
from finetune_memory.limit import MemoryLimit
from finetune_memory.loss import head_of
from finetune_memory.model_shape import LINEAR, ModelShape
from finetune_memory.verdict import workload

HOW_TO_NAME = "give --gpu a name such as H100, or set gpu.product in the profile"

FROZEN_PRODUCTS, TRAINED_PRODUCTS = 2, 3
"""Forward and gradient of the input; and gradient of the weight."""
FORWARD_OF_ATTENTION, BACKWARD_OF_ATTENTION = 2, 5
"""Products of all pairs of tokens; fused attention computes the scores again in its backward pass."""
SCORE_BYTES = 40
"""Read and written for each score by eager attention, forward and backward."""
ELEMENTWISE_BYTES, COMPILED_BYTES = 36, 10
"""Read and written by norms, rotation, activations and sums for each value that a layer's linear layers put out."""
LOGIT_BYTES = 34
"""Read and written for each logit: the product's result, its float32 copy, softmax, and both gradients."""
ADAMW_BYTES = 28
"""Read and written for each trained value: weight, gradient and two moments, in float32."""


@dataclass(frozen=True)
class TimeTerm:
    """One line of the table."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class StepTime:
    """An optimizer step of one rank, which all ranks do at the same time."""

    device: Device
    calibration: Calibration
    terms: tuple[TimeTerm, ...]
    """Time in kernels."""
    link_seconds: float
    """Time of collectives."""
    tokens: int
    """Tokens of all ranks."""
    ranks: int

    @property
    def kernel_seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def step_seconds(self) -> float:
        return max(self.kernel_seconds, self.link_seconds)

    @property
    def bound(self) -> str:
        """What decides, in words."""
        return "the device's kernels" if self.kernel_seconds >= self.link_seconds else "the links between devices"

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second."""
        return self.tokens / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.ranks


class UnknownPaceError(Exception):
    """No time can be calculated; the text says why, and what would help."""


def calculated_pace(
    plan: RunPlan, shape: ModelShape, stored: str, product: str | None, calibration: Calibration = ASSUMED
) -> StepTime:
    """Calculate the step of a plan without open choices, with full rows. Raises UnknownPaceError.

    stored: element type of the base model's files. product: name of the device, if it is known.
    """
    if product is None:
        raise UnknownPaceError(f"no GPU is named, and only for GPUs is time calculated: {HOW_TO_NAME}")
    device = device_of(product)
    if device is None:
        raise UnknownPaceError(f"no peaks of {product!r} are known, as of a part of a device: {HOW_TO_NAME}")
    elements = resolve_elements(plan, stored)
    if elements.computed == "float32":
        raise UnknownPaceError("the job computes in float32, and the peaks of devices are those of 16 bits")
    if plan.parallelism.fsdp.offload_params:
        raise UnknownPaceError("fsdp.offloadParams moves weights over a bus whose speed is not known")
    pacer = _Pacer(plan, shape, elements, device, calibration)
    if not pacer.layers:
        raise UnknownPaceError("the planner finds no layers by the names of the model's parameters")
    return pacer.pace()


def run_steps(plan: RunPlan, tokens: int | None) -> int | None:
    """Optimizer steps of the whole run; None if passes are asked for, and the data's tokens are not known."""
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

    def pace(self) -> StepTime:
        plan, facts, work = self.plan, self.shape.facts, self.work
        ranks, passes = plan.parallelism.world_size, plan.training.gradient_accumulation_steps
        attention = plan.model.attention
        if attention is Attention.SDPA and not facts.has_fused_attention:
            attention = Attention.EAGER
        memory = self.device.memory * self.calibration.memory
        logits_bytes = work.tokens * facts.vocabulary_size * LOGIT_BYTES * (2 if facts.has_whole_logits else 1)
        pairs = "all pairs of tokens, and a mask" if work.has_mask else "half of all pairs of tokens"
        terms = (
            TimeTerm("matrix products", passes * self._products(), f"{work.rows} x {work.length:,} tokens a micro-batch"),
            TimeTerm("attention", passes * self._attention(attention), f"{attention.value}: {pairs}, each row one document"),
            TimeTerm(
                "adapters",
                passes * sum(map(self._adapter_bytes, self.linears)) / memory,
                "fused with the base's products" if plan.method.is_fused else "by PEFT's layers",
            ),
            TimeTerm("unpacking", passes * self._unpacked_bytes() / memory, "4-bit weights, before each product"),
            TimeTerm("elementwise", passes * self._elementwise_bytes() / memory, "norms, rotation, activation, sums"),
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
        """Seconds of the products of all layers' own weights, and of the output head."""
        values = sum(each.inputs * each.outputs * self._times(is_trained=each.is_trained) for each in self.linears)
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
        """Seconds of all layers. With a mask all pairs of a row's tokens are computed, without it half of them."""
        facts, work = self.shape.facts, self.work
        products = FORWARD_OF_ATTENTION * (1 + self.products_again) + BACKWARD_OF_ATTENTION
        pairs = len(self.layers) * work.rows * work.length**2 * (1.0 if work.has_mask else 0.5)
        width = facts.num_heads * (facts.head_size + facts.value_head_size) / 2
        seconds = 2 * products * pairs * width / (self.device.flops * self.calibration.attention)
        scores = pairs * facts.num_heads if kind is Attention.EAGER else 0
        return seconds + scores * SCORE_BYTES / (self.device.memory * self.calibration.memory)

    def _adapter_bytes(self, linear: Linear) -> float:
        """Bytes of LoRA's two small products, whose operations take no time next to them.

        Forward reads the input and adds to the result; backward reads the gradient twice, the input once, and adds its own.
        PEFT's own layers scale and add by kernels of their own.
        """
        of_outputs = 4 if self.plan.method.is_fused else 11
        moved = 6 * linear.inputs + of_outputs * linear.outputs
        return self.work.tokens * moved * self.elements.product if linear.rank else 0.0

    def _unpacked_bytes(self) -> float:
        """Bytes of packed values that are read, and written unpacked, before each product."""
        packing = self.plan.method.quantization
        values = sum(each.inputs * each.outputs for each in self.linears if not each.is_trained)
        per_value = 0.0 if packing is None else packing.bits / 8 + self.elements.product
        return self._times(is_trained=False) * values * per_value

    def _elementwise_bytes(self) -> float:
        facts = self.shape.facts
        values: float = sum(linear.outputs for linear in self.linears)
        for stack in (stack for layer in self.layers for stack in layer.experts):
            values += facts.experts_per_token * stack.numel / (stack.shape[0] * facts.hidden_size)
        per_value = COMPILED_BYTES if self.plan.training.compile else ELEMENTWISE_BYTES
        return self.work.tokens * values * per_value * (4 / 3 if self.is_recomputed else 1)

    def _link_seconds(self, passes: int) -> float:
        """Seconds of the all-gathers of each pass, and of the reduction of gradients."""
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
