"""Seconds of an optimizer step, by what the device has to compute, read and write, send, and start.

A roofline: a matrix product takes as long as its operations or its bytes, whichever is longer, everything else as long as its
bytes. Kernels come one after the other, so their times add up. The host starts them and collectives send while they compute, so
of the three the longest decides. Bytes of kernels in eager mode are those of transformers' layers, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.api.training import ActivationCheckpointing, GradientReduction
from finetune_job.plan.element_types import VALUE_BYTES, Elements, resolve_elements
from finetune_job.plan.run_plan import RunPlan
from finetune_memory.devices import ASSUMED, NETWORK_BYTES_PER_SECOND, Calibration, Device, device_of
from finetune_memory.elementwise import operations
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
LOGIT_BYTES = 34
"""Of a logit, forward and backward: the product's result, its float32 copy, softmax, and both gradients."""
ADAMW_BYTES = 28
"""Of a trained value: weight, gradient and two moments read, three of them written, in float32."""


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
    launch_seconds: float
    """That the host takes to start them."""
    link_seconds: float
    """Of collectives."""
    tokens: int
    """Of all ranks."""
    ranks: int

    @property
    def kernel_seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def step_seconds(self) -> float:
        """The longest of the three."""
        return max(self.kernel_seconds, self.launch_seconds, self.link_seconds)

    @property
    def bound(self) -> str:
        """What decides, in words."""
        return {
            self.kernel_seconds: "the device's kernels",
            self.launch_seconds: "the host, which starts kernels more slowly than the device computes them",
            self.link_seconds: "the links between devices",
        }[self.step_seconds]

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.step_seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.ranks


class UnknownPaceError(Exception):
    """No time can be calculated; the text says why, and what would help."""


def calculated_pace(
    plan: RunPlan, shape: ModelShape, stored: str, product: str | None, calibration: Calibration = ASSUMED
) -> StepTime:
    """Of a plan without open choices, with full rows. Raises UnknownPaceError.

    stored: element type of the base model's files. product: name of the device; None: nobody has said.
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
    """Optimizer steps of the whole run; None if passes are asked for, and nobody has said how many tokens the data has."""
    training = plan.training
    if training.max_steps is not None:
        return training.max_steps
    if tokens is None or training.epochs is None:
        return None
    sequences = math.ceil(tokens / plan.data.max_sequence_length)
    return max(math.ceil(training.epochs * sequences / training.global_batch_size), 1)


class _Pacer:
    def __init__(self, plan: RunPlan, shape: ModelShape, elements: Elements, device: Device, calibration: Calibration) -> None:
        self.plan, self.shape, self.elements = plan, shape, elements
        self.work = workload(plan, MemoryLimit(0, is_device=True, source=device.name))
        self.device, self.calibration = device, calibration
        self.flops, self.memory = device.flops * calibration.flops, device.memory * calibration.memory
        self.layers: Sequence[Layer] = read_layers(shape)
        training = plan.training
        self.again = training.activation_checkpointing is not ActivationCheckpointing.NONE
        self.products_again = training.activation_checkpointing is ActivationCheckpointing.FULL
        self.passes = training.gradient_accumulation_steps
        self.is_fused = plan.method.is_fused
        attention = plan.model.attention
        fused = shape.facts.has_fused_attention
        self.attention = Attention.EAGER if attention is Attention.SDPA and not fused else attention

    def pace(self) -> StepTime:
        world_size = self.plan.parallelism.world_size
        micro = [
            TimeTerm("matrix products", self._products(), f"{self.work.rows} x {self.work.length:,} tokens a micro-batch"),
            TimeTerm("attention", len(self.layers) * self._attention(), self._attention_detail()),
            TimeTerm("adapters", sum(self._adapter(each) for each in self._linears()), self._adapter_detail()),
            TimeTerm("unpacking", self._unpacking(), "4-bit weights, before each product"),
            TimeTerm("elementwise", sum(map(self._elementwise, self.layers)) / self.memory, "norms, rotation, activation, sums"),
            TimeTerm("logits and loss", self._loss(), f"vocabulary of {self.shape.facts.vocabulary_size:,}"),
        ]
        terms = [TimeTerm(each.name, each.seconds * self.passes, each.detail) for each in micro]
        terms.append(TimeTerm("optimizer", self._optimizer(), "weights, gradients and moments, read and written"))
        return StepTime(
            device=self.device,
            calibration=self.calibration,
            terms=tuple(term for term in terms if term.seconds),
            launch_seconds=self.passes * sum(map(self._kernels, self.layers)) * self.calibration.launch_seconds,
            link_seconds=self._link_bytes() / self._link() if world_size > 1 else 0.0,
            tokens=self.work.tokens * self.passes * world_size,
            ranks=world_size,
        )

    def _linears(self) -> list[Linear]:
        return [linear for layer in self.layers for linear in layer.linears]

    def _product(self, rows: float, inputs: int, outputs: int, times: int) -> float:
        """Seconds of products of [rows, inputs] with [inputs, outputs]."""
        size = self.elements.product
        moved = size * (rows * inputs + inputs * outputs + rows * outputs)
        return times * max(2 * rows * inputs * outputs / self.flops, moved / self.memory)

    def _products(self) -> float:
        """All layers' own weights, and the output head."""
        total, tokens, again = 0.0, self.work.tokens, int(self.products_again)
        for layer in self.layers:
            for linear in layer.linears:
                times = (TRAINED_PRODUCTS if linear.is_trained else FROZEN_PRODUCTS) + again
                total += self._product(tokens, linear.inputs, linear.outputs, times)
            for stack in layer.experts:
                count, rows, columns = stack.shape
                share = tokens * self.shape.facts.experts_per_token / count
                times = (TRAINED_PRODUCTS if stack.is_trained or layer.expert_factors else FROZEN_PRODUCTS) + again
                total += count * self._product(share, columns, rows, times)
        head = head_of(self.shape)
        if head is not None:
            times = (TRAINED_PRODUCTS if head.is_trained else FROZEN_PRODUCTS) + int(self.shape.facts.has_whole_logits)
            total += self._product(tokens, head.shape[1], head.shape[0], times)
        return total

    def _attention(self) -> float:
        """Of one layer. Documents as long as rows; with a mask all pairs of tokens are computed, without it half of them."""
        facts, work = self.shape.facts, self.work
        products = FORWARD_OF_ATTENTION + BACKWARD_OF_ATTENTION + FORWARD_OF_ATTENTION * self.products_again
        pairs = work.rows * work.length**2 * (1.0 if work.has_mask else 0.5)
        width = facts.num_heads * (facts.head_size + facts.value_head_size) / 2
        seconds = 2 * products * pairs * width / (self.device.flops * self.calibration.attention)
        if self.attention is Attention.EAGER:
            # Scores scaled, masked, softmax in float32 and cast back: about 20 bytes of a score forward, and 20 backward.
            seconds += 40 * pairs * facts.num_heads / self.memory
        elif work.has_mask:
            # Mask as summands: made once in each layer, read forward and backward; keys and values repeated for each head.
            repeated = 2 * work.tokens * width if facts.num_key_value_heads < facts.num_heads else 0
            seconds += (3 * work.rows * work.length**2 + 4 * repeated) * self.elements.product / self.memory
        return seconds

    def _attention_detail(self) -> str:
        pairs = "all pairs of tokens, and a mask" if self.work.has_mask else "half of all pairs of tokens"
        return f"{self.attention.value}: {pairs}, each row one document"

    def _adapter(self, linear: Linear) -> float:
        """Reads and writes of LoRA's two small products, whose operations take no time next to them."""
        if not linear.rank:
            return 0.0
        inputs, outputs, size = linear.inputs, linear.outputs, self.elements.product
        # Forward reads the input and adds to the result; backward reads the gradient twice, the input once, and adds its own.
        moved = (6 * inputs + 4 * outputs) * size
        if not self.is_fused:
            # Scaled and added by kernels of their own.
            moved += 7 * outputs * size
        elif self.plan.method.quantization is not None:
            # A copy of what the base computed.
            moved += 2 * outputs * size
        if not self.is_fused and self.elements.adapter_copies_input(linear.adapter_dtype):
            moved += 2 * inputs * (size + VALUE_BYTES[linear.adapter_dtype])
        if linear.has_magnitude:
            # The norm of base and adapter together, of a weight and not of tokens; and the magnitude's product.
            moved += 6 * outputs * size
            weight = 5 * inputs * outputs * size / self.memory
        else:
            weight = 0.0
        return self.work.tokens * moved / self.memory + weight

    def _adapter_detail(self) -> str:
        return "fused with the base's products" if self.is_fused else "by PEFT's layers"

    def _unpacking(self) -> float:
        """Half a byte read, a value written, before each product of a packed weight."""
        if self.plan.method.quantization is None:
            return 0.0
        values = sum(linear.inputs * linear.outputs for linear in self._linears() if not linear.is_trained)
        bits = self.plan.method.quantization.bits
        return (FROZEN_PRODUCTS + int(self.products_again)) * values * (bits / 8 + self.elements.product) / self.memory

    def _elementwise(self, layer: Layer) -> float:
        """Bytes."""
        return self.work.tokens * sum(
            values * (cost.forward * (2 if self.again else 1) + cost.backward)
            for cost, values in operations(layer, self.shape.facts, is_compiled=self.plan.training.compile)
        )

    def _kernels(self, layer: Layer) -> int:
        """Started for a micro-batch: forward, again if it is computed again, and twice as many backward."""
        forward = (
            len(layer.linears)
            + 2
            + sum(cost.kernels for cost, _ in operations(layer, self.shape.facts, is_compiled=self.plan.training.compile))
            + 4 * len(layer.experts)
        )
        for linear in layer.linears:
            forward += (4 if self.is_fused else 6) if linear.rank else 0
            forward += 8 if linear.has_magnitude else 0
            forward += 1 if self.plan.method.quantization is not None and not linear.is_trained else 0
        return forward * (4 if self.again else 3)

    def _loss(self) -> float:
        logits = self.work.tokens * self.shape.facts.vocabulary_size
        return logits * LOGIT_BYTES * (2 if self.shape.facts.has_whole_logits else 1) / self.memory

    def _optimizer(self) -> float:
        ordered = self.plan.training.reduction is GradientReduction.ORDERED
        return self.shape.num_trained / (1 if ordered else self.plan.parallelism.world_size) * ADAMW_BYTES / self.memory

    def _link(self) -> float:
        """Bytes per second that a rank sends."""
        peak = self.device.link if self.plan.parallelism.nodes == 1 else min(self.device.link, NETWORK_BYTES_PER_SECOND)
        return peak * self.calibration.link

    def _link_bytes(self) -> float:
        """Of all-gathers in each pass, and of the reduction of gradients, that a rank sends in a step."""
        plan, world_size = self.plan, self.plan.parallelism.world_size
        width = self.elements.param if self.elements.casts_parameters else None
        ordered = plan.training.reduction is GradientReduction.ORDERED
        packed = plan.method.quantization
        gathered = 0.0
        for each in self.shape.parameters:
            if each.is_trained and ordered:
                continue
            is_packed = packed is not None and each.kind in LINEAR and not each.is_trained
            size = packed.bits / 8 if packed is not None and is_packed else VALUE_BYTES[width or each.dtype]
            gathered += each.numel * size
        fsdp = plan.parallelism.fsdp
        gathers = 1 if fsdp.version == 2 and fsdp.reshard_after_forward is False else 2
        reduced = self.shape.num_trained * VALUE_BYTES[self.elements.reduce or "float32"]
        if ordered:
            reduced *= world_size
        elif not plan.method.trains_adapter:
            reduced *= self.passes
        return (world_size - 1) / world_size * (gathered * gathers * self.passes + reduced)
