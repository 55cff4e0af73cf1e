"""Estimates the bytes that a rank needs, term by term, at the peak of loading or of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune_job.api.inputs import Attention
from finetune_job.api.training import ActivationCheckpointing, GradientReduction, OptimizerName
from finetune_job.plan.element_types import VALUE_BYTES, Elements
from finetune_job.plan.run_plan import RunPlan
from finetune_job.sharding import ORDERED_VALUES_AT_ONCE, can_load_shards
from finetune_memory.activations import Activations, TrainingPass, layer_activations
from finetune_memory.adapters import quantised
from finetune_memory.layers import Layer, read_layers
from finetune_memory.loss import loss_bytes
from finetune_memory.model_shape import LINEAR, ModelShape, Workload
from finetune_memory.optimizers import state_bytes
from finetune_memory.packed_experts import packing
from finetune_memory.sharding import Unit, gathered_bytes, reduced_bytes, shards, units_of

CONTEXT_BYTES = 1 << 30
"""Assumed GPU memory for the driver, the libraries' handles and NCCL's buffers; 0.5 to 1.2 GiB have been observed."""
FRAGMENTATION_RATIO = 0.05
"""Assumed share of the allocated memory that torch's allocator cannot use because it is fragmented."""
HOST_BASE_BYTES = 3 << 29
"""Assumed memory of a Python process with torch, transformers and peft."""
WHOLE_BASE = "the whole base, in every rank until it is sharded or on the device"
SEQUENTIAL_BYTES = 8 * 5
"""Bytes for the id, position and label of one token, and for its row and label among the scored ones."""


@dataclass(frozen=True)
class Term:
    """One line in the table of an estimate."""

    name: str
    bytes: int
    detail: str
    """The parts of the term, in words."""


@dataclass(frozen=True)
class Estimate:
    """The memory of the rank that needs the most."""

    terms: tuple[Term, ...]
    """Terms of device memory (of host memory on a CPU) at the peak."""
    moment: str
    host_terms: tuple[Term, ...]
    """Terms of host memory for each rank of the training pod; empty on a CPU, where `terms` are host memory already."""

    @property
    def total(self) -> int:
        """Bytes that one rank needs."""
        return sum(term.bytes for term in self.terms)

    @property
    def host_total(self) -> int:
        """Bytes of the pod's memory that one rank needs."""
        return sum(term.bytes for term in self.host_terms)

    @property
    def largest(self) -> tuple[Term, ...]:
        """The terms, largest first."""
        return tuple(sorted(self.terms, key=lambda term: -term.bytes))


def estimate(
    plan: RunPlan, shape: ModelShape, elements: Elements, work: Workload, layers: Sequence[Layer] | None = None
) -> Estimate:
    """Estimate the memory of rank 0; no rank needs more. layers: the layers of `shape`, if they have been read already."""
    return _Estimator(plan, shape, elements, work, read_layers(shape) if layers is None else layers).estimate()


def quantised_shape(plan: RunPlan, shape: ModelShape, elements: Elements) -> ModelShape:
    """Return the model with its frozen weights quantised, if the plan quantises them."""
    if plan.method.quantization is None:
        return shape
    parameters, constant = quantised(shape.parameters, plan.method.quantization, elements.load)
    return ModelShape(parameters, shape.units, shape.facts, shape.constant_bytes + constant)


class _Estimator:
    def __init__(self, plan: RunPlan, shape: ModelShape, elements: Elements, work: Workload, layers: Sequence[Layer]) -> None:
        self.plan, self.elements, self.work, self.shape, self.layers = plan, elements, work, shape, layers
        self._costs: dict[tuple[Layer, bool], Activations] = {}
        self.quantised = quantised_shape(plan, shape, elements)
        self.is_quantised = plan.method.quantization is not None
        self.units: tuple[Unit, ...] = units_of(self.quantised)
        # On its minimum number of nodes, a gang has the fewest ranks to share the base; each then computes several virtual ranks.
        self.world_size = plan.parallelism.smallest_world_size
        self.is_sharded = self.world_size > 1
        self.is_ordered = plan.training.reduction is GradientReduction.ORDERED
        self.kept = shards(
            self.units, plan.parallelism.fsdp, self.world_size, param_dtype=elements.param, is_replicated=self.is_ordered
        )
        self.state_bytes = state_bytes(plan.training, self.kept.trained_elements, self.kept.trained_tensors)
        # What every rank keeps whole is neither gathered nor reduced by FSDP.
        self.gathered = tuple(unit.frozen() for unit in self.units) if self.is_ordered else self.units
        self.is_offloaded = plan.parallelism.fsdp.offload_params and self.is_sharded and work.on_gpu
        attention = plan.model.attention
        if attention is Attention.SDPA and not shape.facts.has_fused_attention:
            attention = Attention.EAGER
        self.during = TrainingPass(
            shape.facts,
            work,
            elements,
            attention,
            plan.method.lora.lora_dropout if plan.method.lora is not None else 0.0,
            is_packed=self.is_quantised,
            fuses_adapters=plan.method.is_fused,
            is_compiled=plan.training.compile,
        )

    def estimate(self) -> Estimate:
        moments = {
            "the end of the forward pass": self._forward(),
            "the start of the backward pass": self._backward(),
            "the end of the backward pass": self._backward_end(),
            "the optimizer step": self._step(),
            "loading": self._loading(),
        }
        moment, terms = max(moments.items(), key=lambda item: sum(term.bytes for term in item[1]))
        constants = "buffers, and the scales of quantised weights: whole on every rank"
        everything = [] if self.is_offloaded else self._shards()
        everything += [Term("constants", self.quantised.constant_bytes, constants), *terms]
        process = Term("process", HOST_BASE_BYTES, "Python, torch and their libraries (assumed)")
        # A synchronous checkpoint, for which training waits, is written without a copy.
        snapshot = self.kept.trained_elements + self.state_bytes if self.plan.checkpoint.asynchronous else 0
        host: list[Term] = []
        if self.work.on_gpu:
            slack = int(sum(term.bytes for term in everything) * FRAGMENTATION_RATIO)
            everything.append(Term("allocator slack", slack, f"{FRAGMENTATION_RATIO:.0%} of the above (assumed)"))
            everything.append(Term("CUDA context", CONTEXT_BYTES, "driver, libraries and NCCL (assumed)"))
            while_trained = self._shards() if self.is_offloaded else []
            pinned = "pinned; the copy that is written while training continues"
            while_trained.append(Term("checkpoint snapshot", snapshot, pinned))
            loaded = Term("base while it is loaded", 0 if self.is_quantised else self._read_whole(), WHOLE_BASE)
            # The whole base has left host memory before the first checkpoint, so the two are never in memory together.
            host = [loaded] if loaded.bytes > sum(term.bytes for term in while_trained) else while_trained
            host.append(process)
        else:
            everything.append(Term("checkpoint snapshot", snapshot, "a copy that is written while training continues"))
            everything.append(process)
        used, used_on_host = (tuple(term for term in terms if term.bytes) for terms in (everything, host))
        return Estimate(used, moment, used_on_host)

    def _shards(self) -> list[Term]:
        """Return the terms for what a rank holds all through training."""
        kept, cut = self.kept, f"1/{self.world_size}" if self.is_sharded else "all"
        quantization, load = self.plan.method.quantization, self.elements.load
        form = f"as {load}"
        if quantization is not None:
            counts = packing(self.shape.parameters, self.quantised.parameters)
            experts = f": {counts.expert_share:.1%} are experts, which are not packed" if counts.experts else ""
            form = f"{counts.packed_share:.1%} of its values in {quantization.bits} bits, the rest as {load}{experts}"
        return [
            Term("frozen weights", kept.frozen, f"{cut} of the base, {form}"),
            Term("trained weights", kept.trained, f"{'all' if self.is_ordered else cut} of {self.shape.num_trained:,} values"),
            Term("optimizer state", self.state_bytes, f"{self.plan.training.optimizer.value} of the trained weights"),
        ]

    def _accumulated(self) -> Term:
        """Return the term of the gradients held while a step's later micro-batches are computed."""
        if self.plan.training.gradient_accumulation_steps == 1:
            return Term("gradients", 0, "")
        if not self.is_sharded or self.is_ordered or all(parameter.is_trained for parameter in self.shape.parameters):
            return Term("gradients", self.kept.gradients, "of the earlier micro-batches")
        trained = [parameter for parameter in self.quantised.parameters if parameter.is_trained]
        whole = sum(parameter.numel * VALUE_BYTES[self.elements.reduce or parameter.dtype] for parameter in trained)
        return Term("gradients", whole, "of the earlier micro-batches, whole until the last of a step")

    def _gathered(self) -> Term:
        if not self.is_sharded:
            return Term("gathered weights", 0, "")
        largest = max(self.gathered, key=lambda unit: unit.gathered_bytes(self.elements.param))
        return Term(
            "gathered weights",
            gathered_bytes(self.gathered, self.plan.parallelism.fsdp, self.elements),
            f"all-gather; largest unit: {largest.name or 'the root (embeddings, head and everything that no unit holds)'}",
        )

    def _saved(self) -> tuple[Term, int]:
        """Return the term of activations kept until the backward pass, and the most bytes that one layer adds when recomputed."""
        embeddings_trained = any(parameter.is_trained and "embed" in parameter.name for parameter in self.shape.parameters)
        costs = [self._cost(layer, is_first=number == 0 and not embeddings_trained) for number, layer in enumerate(self.layers)]
        tokens, facts, work = self.work.tokens, self.shape.facts, self.work
        kept = tokens * SEQUENTIAL_BYTES + 2 * tokens * facts.head_size * self.elements.stream
        kept += work.rows * work.length**2 if work.has_mask else 0
        if self.elements.param is not None and not self.elements.casts_parameters:
            # Autocast keeps its cast copies of trained matrices for the backward pass.
            size = VALUE_BYTES[self.elements.param]
            kept += sum(
                parameter.numel * size
                for parameter in self.quantised.parameters
                if parameter.is_trained
                and len(parameter.shape) > 1
                and parameter.kind != "embedding"
                and VALUE_BYTES[parameter.dtype] != size
            )
        again = max((cost.kept for cost in costs), default=0)
        match self.plan.training.activation_checkpointing:
            case ActivationCheckpointing.NONE:
                how, again = "all kept", 0
                kept += sum(cost.kept for cost in costs)
            case ActivationCheckpointing.SELECTIVE:
                how = "results of products and attention kept"
                kept += sum(cost.products + cost.boundary for cost in costs)
            case ActivationCheckpointing.FULL:
                how = "inputs of layers kept"
                kept += sum(cost.boundary for cost in costs)
        return Term("activations", kept, f"{work.rows} x {work.length:,} tokens, {how}"), again

    def _loading(self) -> list[Term]:
        """Return the term of loading: a rank that cannot load only its own shards holds the whole base until sharding.

        Otherwise a rank holds at most two packed weights at a time (model/pack_shards.py), which is less than a step gathers.
        DoRA's norms are computed from one weight at a time, as in a step.
        """
        if not self.is_sharded:
            return []
        if self.is_quantised:
            return [Term("packed weights", max(self._read_whole() - self.kept.frozen, 0), "the whole base, until it is sharded")]
        if self.work.on_gpu:
            return []
        kept_bytes = self.kept.frozen if self.plan.method.trains_adapter else self.kept.frozen + self.kept.trained
        return [Term("base while it is loaded", max(self._read_whole() - kept_bytes, 0), WHOLE_BASE)]

    def _read_whole(self) -> int:
        """Count the bytes of the base if a rank reads all of it; 0 if it reads only its own shards (model/load_shards.py)."""
        method = self.plan.method
        bits = None if method.quantization is None else method.quantization.bits
        by_shards = can_load_shards(method.type, bits, has_remote_code=self.plan.model.allow_remote_code)
        if by_shards and self.is_sharded and not self.shape.facts.is_stored_otherwise:
            return 0
        parameters = self.quantised.parameters
        return sum(parameter.num_bytes for parameter in parameters if not (parameter.is_trained and method.trains_adapter))

    def _forward(self) -> list[Term]:
        kept, working = loss_bytes(self.shape, self.during)
        vocabulary = f"vocabulary of {self.shape.facts.vocabulary_size:,}"
        return [self._saved()[0], Term("logits and loss", kept + working, vocabulary), self._gathered(), self._accumulated()]

    def _backward(self) -> list[Term]:
        saved, again = self._saved()
        kept, _ = loss_bytes(self.shape, self.during)
        frozen = [parameter for parameter in self.shape.parameters if parameter.kind in LINEAR and not parameter.is_trained]
        size, lora, norms = self.elements.product, self.plan.method.lora, 0
        if lora is not None and lora.use_dora:
            # DoRA computes norms while a layer is recomputed. They need B @ A, a scaled copy of it, its sum with the weight, and
            # the identity matrix, as wide as the input, from which B @ A is computed.
            widths = ((parameter, parameter.shape[0 if parameter.kind == "transposed" else -1]) for parameter in frozen)
            norms = max((3 * parameter.numel + inputs**2 for parameter, inputs in widths), default=0) * size
        gradients = self._layer(-1).backward
        unpacked = self.is_quantised * max((parameter.numel for parameter in frozen), default=0) * size
        return [
            saved,
            Term("logits and loss", kept, "gradient of the hidden states"),
            Term("computed again", again, "of one checkpointed layer"),
            Term("temporary", max(gradients, norms), "norms of DoRA" if norms > gradients else "gradients inside one layer"),
            Term("unpacked weights", unpacked, "of the largest layer"),
            self._gathered(),
            self._accumulated(),
            self._reduced(),
        ]

    def _backward_end(self) -> list[Term]:
        """Return the terms of the moment when all gradients exist and only one layer's activations are left."""
        layer = self._layer(0)
        pending = self.layers[0].trained_bytes // self.world_size if self.layers else 0
        return [
            Term("gradients", self.kept.gradients - pending, "of the trained weights, except the first layer's"),
            Term("activations", layer.kept, "of one layer"),
            Term("temporary", layer.backward, "gradients inside one layer"),
            self._gathered(),
            self._reduced(),
        ]

    def _layer(self, number: int) -> Activations:
        return self._cost(self.layers[number], is_first=False) if self.layers else Activations(0, 0, 0, 0)

    def _cost(self, layer: Layer, *, is_first: bool) -> Activations:
        # Most layers of a model are equal, so the cost is computed once for each kind.
        if (layer, is_first) not in self._costs:
            self._costs[layer, is_first] = layer_activations(layer, self.during, is_first=is_first)
        return self._costs[layer, is_first]

    def _reduced(self) -> Term:
        size = reduced_bytes(self.gathered, self.elements) if self.is_sharded else 0
        return Term("reduced gradients", size, "reduce-scatter of the largest unit")

    def _step(self) -> list[Term]:
        optimizer = self.plan.training.optimizer
        # AdamW's fused update needs no temporary memory. The others' foreach update holds intermediate results for all values.
        temporary = 0 if optimizer is OptimizerName.ADAMW else 2 * self.kept.trained_elements
        # An ordered reduction also holds the gradients of each virtual rank here, and the chunk that is being exchanged.
        values = self.shape.num_trained if self.is_ordered else 0
        rounds = -(-self.plan.parallelism.world_size // self.world_size)
        exchanged = (self.world_size + 1) * rounds * min(values, ORDERED_VALUES_AT_ONCE)
        root = self.gathered[-1].gathered_bytes(self.elements.param) if self.is_sharded and not self.gathered[-1].name else 0
        return [
            Term("gradients", self.kept.gradients, "reduced"),
            Term("ordered sum", 4 * (rounds * values + exchanged), "of the gradients of all ranks, as float32"),
            Term("temporary", temporary, f"update of {optimizer.value}"),
            Term("gathered weights", root, "the root, until it is gathered again"),
        ]
