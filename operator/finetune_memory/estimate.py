"""RunPlan and ModelShape -> bytes per rank, term by term, at the fullest moment of an optimizer step."""

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
from finetune_memory.model_shape import LINEAR, ModelShape, ParameterShape, Workload
from finetune_memory.optimizers import state_bytes
from finetune_memory.packed_experts import packing
from finetune_memory.sharding import Unit, gathered_bytes, reduced_bytes, shards, units_of

CONTEXT_BYTES = 1 << 30
"""Assumed: what driver, libraries' handles and NCCL's buffers take of a GPU. Seen: 0.5 to 1.2 GiB."""
FRAGMENTATION_RATIO = 0.05
"""Assumed: share of what is allocated that torch's allocator cannot use, because it is cut into pieces."""
HOST_BASE_BYTES = 3 << 29
"""Assumed: a Python process with torch, transformers and peft."""
WHOLE_BASE = "the whole base, in every rank until it is sharded or on the device"
SEQUENTIAL_BYTES = 8 * 5
"""Token ids, positions and labels of a token, and the rows and labels that are scored."""


@dataclass(frozen=True)
class Term:
    """One line of the table."""

    name: str
    bytes: int
    detail: str
    """What it is made of."""


@dataclass(frozen=True)
class Estimate:
    """What the fullest rank needs."""

    terms: tuple[Term, ...]
    """Of device memory (of host memory on a CPU) at the fullest moment."""
    moment: str
    host_terms: tuple[Term, ...]
    """Of the memory of the training pod, for each of its ranks; empty on a CPU, which has no other memory."""

    @property
    def total(self) -> int:
        """Bytes of one rank."""
        return sum(term.bytes for term in self.terms)

    @property
    def host_total(self) -> int:
        """Bytes of one rank."""
        return sum(term.bytes for term in self.host_terms)

    @property
    def largest(self) -> tuple[Term, ...]:
        """Terms, largest first."""
        return tuple(sorted(self.terms, key=lambda term: -term.bytes))


def estimate(
    plan: RunPlan, shape: ModelShape, elements: Elements, work: Workload, layers: Sequence[Layer] | None = None
) -> Estimate:
    """The memory of rank 0, than which no rank needs more. `layers`: those of `shape`, where they have been read already."""
    return _Estimator(plan, shape, elements, work, read_layers(shape) if layers is None else layers).estimate()


def quantised_shape(plan: RunPlan, shape: ModelShape, elements: Elements) -> ModelShape:
    """The model with its frozen weights quantised where the plan says so."""
    if plan.method.quantization is None:
        return shape
    parameters, constant = quantised(shape.parameters, plan.method.quantization, elements.load)
    return ModelShape(parameters, shape.units, shape.facts, shape.constant_bytes + constant)


class _Estimator:
    def __init__(self, plan: RunPlan, shape: ModelShape, elements: Elements, work: Workload, layers: Sequence[Layer]) -> None:
        self.plan, self.elements, self.work, self.shape, self.layers = plan, elements, work, shape, layers
        self._costs: dict[tuple[Layer, bool], Activations] = {}
        self.held = quantised_shape(plan, shape, elements)
        self.units: tuple[Unit, ...] = units_of(self.held)
        # On its fewest nodes a gang shares the base among the fewest ranks; each then adds up for several virtual ranks.
        self.world_size = plan.parallelism.smallest_world_size
        self.is_ordered = plan.training.reduction is GradientReduction.ORDERED
        self.kept = shards(
            self.units, plan.parallelism.fsdp, self.world_size, param_dtype=elements.param, is_replicated=self.is_ordered
        )
        self.is_sharded = self.world_size > 1
        # What every rank keeps whole is neither gathered nor reduced by FSDP.
        self.gathered = tuple(unit.frozen() for unit in self.units) if self.is_ordered else self.units
        lora = plan.method.lora
        attention = plan.model.attention
        if attention is Attention.SDPA and not shape.facts.has_fused_attention:
            attention = Attention.EAGER
        dropout = lora.lora_dropout if lora is not None else 0.0
        self.during = TrainingPass(
            shape.facts,
            work,
            elements,
            attention,
            dropout,
            is_packed=plan.method.quantization is not None,
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
        name, terms = max(moments.items(), key=lambda item: sum(term.bytes for term in item[1]))
        everything = [*self._state(), *terms]
        if self.work.on_gpu:
            used = sum(term.bytes for term in everything)
            everything.append(
                Term("allocator slack", int(used * FRAGMENTATION_RATIO), f"{FRAGMENTATION_RATIO:.0%} of the above (assumed)")
            )
            everything.append(Term("CUDA context", CONTEXT_BYTES, "driver, libraries and NCCL (assumed)"))
        else:
            everything += self._process()
        return Estimate(tuple(term for term in everything if term.bytes), name, self._host())

    def _state(self) -> list[Term]:
        """What is there all the time."""
        offloaded = self.plan.parallelism.fsdp.offload_params and self.is_sharded and self.work.on_gpu
        constants = Term(
            "constants", self.held.constant_bytes, "buffers, and the scales of quantised weights: whole on every rank"
        )
        if offloaded:
            return [constants]
        return [*self._shards(), constants]

    def _shards(self) -> list[Term]:
        kept, cut = self.kept, f"1/{self.world_size}" if self.is_sharded else "all"
        return [
            Term("frozen weights", kept.frozen, f"{cut} of the base, {self._held_types()}"),
            Term("trained weights", kept.trained, f"{'all' if self.is_ordered else cut} of {self.shape.num_trained:,} values"),
            Term("optimizer state", self._state_bytes(), f"{self.plan.training.optimizer.value} of the trained weights"),
        ]

    def _held_types(self) -> str:
        quantization, load = self.plan.method.quantization, self.elements.load
        if quantization is None:
            return f"as {load}"
        found = packing(self.shape.parameters, self.held.parameters)
        experts = f": {found.expert_share:.1%} are experts, which are not packed" if found.experts else ""
        return f"{found.packed_share:.1%} of its values in {quantization.bits} bits, the rest as {load}{experts}"

    def _state_bytes(self) -> int:
        return state_bytes(self.plan.training, self.kept.trained_elements, self.kept.trained_tensors)

    def _accumulated(self) -> Term:
        """Gradients while a step's later micro-batches are computed."""
        if self.plan.training.gradient_accumulation_steps == 1:
            return Term("gradients", 0, "")
        if not self.is_sharded or self.is_ordered or all(each.is_trained for each in self.shape.parameters):
            return Term("gradients", self.kept.gradients, "of the earlier micro-batches")
        width = {each.name: VALUE_BYTES[self.elements.reduce or each.dtype] for each in self.held.parameters}
        whole = sum(each.numel * width[each.name] for each in self.held.parameters if each.is_trained)
        return Term("gradients", whole, "of the earlier micro-batches, whole until the last of a step")

    def _gathered(self) -> Term:
        if not self.is_sharded:
            return Term("gathered weights", 0, "")
        largest = max(self.gathered, key=lambda unit: unit.gathered_bytes(self.elements.param))
        return Term(
            "gathered weights",
            gathered_bytes(self.gathered, self.plan.parallelism.fsdp, self.elements),
            f"all-gather; largest unit: {largest.name or 'the root (embeddings, head and all that no unit holds)'}",
        )

    def _autocast_copies(self) -> int:
        """Trained matrices that autocast has cast and keeps for the backward pass."""
        if self.elements.casts_parameters or self.elements.param is None:
            return 0
        size = VALUE_BYTES[self.elements.param]
        return sum(
            each.numel * size
            for each in self.held.parameters
            if each.is_trained and len(each.shape) > 1 and each.kind != "embedding" and VALUE_BYTES[each.dtype] != size
        )

    def _saved(self) -> tuple[int, int]:
        """Activations that are kept until the backward pass, and the most that one layer adds while it is computed again."""
        embeddings_trained = any(each.is_trained and "embed" in each.name for each in self.shape.parameters)
        costs = [self._cost(layer, is_first=number == 0 and not embeddings_trained) for number, layer in enumerate(self.layers)]
        tokens, facts = self.work.tokens, self.shape.facts
        shared = tokens * SEQUENTIAL_BYTES + 2 * tokens * facts.head_size * self.elements.stream
        shared += self.work.rows * self.work.length**2 if self.work.has_mask else 0
        shared += self._autocast_copies()
        again = max((cost.kept for cost in costs), default=0)
        match self.plan.training.activation_checkpointing:
            case ActivationCheckpointing.NONE:
                return shared + sum(cost.kept for cost in costs), 0
            case ActivationCheckpointing.SELECTIVE:
                return shared + sum(cost.products + cost.boundary for cost in costs), again
            case ActivationCheckpointing.FULL:
                return shared + sum(cost.boundary for cost in costs), again

    def _kept_activations(self) -> str:
        how = {
            ActivationCheckpointing.NONE: "all kept",
            ActivationCheckpointing.SELECTIVE: "results of products and attention kept",
            ActivationCheckpointing.FULL: "inputs of layers kept",
        }[self.plan.training.activation_checkpointing]
        return f"{self.work.rows} x {self.work.length:,} tokens, {how}"

    def _loading(self) -> list[Term]:
        """What a rank packs or reads of the base before it is sharded: all of it, where it cannot load its shards alone.

        Then there are at most two packed weights at a time (model/pack_shards.py): less than a step gathers of any unit. DoRA's
        norms are taken of one weight at a time, as in a step.
        """
        if not self.is_sharded:
            return []
        if self.plan.method.quantization is not None:
            whole = sum(each.num_bytes for each in self.held.parameters if not each.is_trained) if self._loads_whole() else 0
            return [Term("packed weights", max(whole - self.kept.frozen, 0), "the whole base, until it is sharded")]
        if self.work.on_gpu:
            return []
        held = self.kept.frozen if self.plan.method.trains_adapter else self.kept.frozen + self.kept.trained
        return [Term("base while it is loaded", max(self._read_whole() - held, 0), WHOLE_BASE)]

    def _loads_whole(self) -> bool:
        """Whether a rank reads all of the base, and not its own shards alone (model/load_shards.py)."""
        method = self.plan.method
        bits = None if method.quantization is None else method.quantization.bits
        by_shards = can_load_shards(method.type, bits, has_remote_code=self.plan.model.allow_remote_code)
        return not by_shards or not self.is_sharded or self.shape.facts.is_stored_otherwise

    def _read_whole(self) -> int:
        """Bytes of the base where a rank reads all of it into host memory; packed weights go to the device tensor by tensor."""
        plan = self.plan
        if plan.method.quantization is not None or not self._loads_whole():
            return 0
        return sum(each.num_bytes for each in self.held.parameters if not (each.is_trained and plan.method.trains_adapter))

    def _unpacked(self) -> Term:
        is_packed = self.plan.method.quantization is not None
        largest = max((each.numel for each in self._frozen_linears()), default=0)
        return Term("unpacked weights", is_packed * largest * self.elements.product, "of the largest layer")

    def _frozen_linears(self) -> list[ParameterShape]:
        return [each for each in self.shape.parameters if each.kind in LINEAR and not each.is_trained]

    def _temporary(self) -> Term:
        """Gradients inside a layer, or what DoRA takes norms of while it is computed again: B @ A, the same scaled, its sum with
        the weight, and the matrix of ones, as wide as the input, that it comes from.
        """
        lora, norms = self.plan.method.lora, 0
        if lora is not None and lora.use_dora:
            widths = ((each, each.shape[0 if each.kind == "transposed" else -1]) for each in self._frozen_linears())
            norms = max((3 * each.numel + inputs**2 for each, inputs in widths), default=0) * self.elements.product
        gradients = self._layer(-1).backward
        return Term("temporary", max(gradients, norms), "norms of DoRA" if norms > gradients else "gradients inside one layer")

    def _forward(self) -> list[Term]:
        kept, working = loss_bytes(self.shape, self.during)
        return [
            Term("activations", self._saved()[0], self._kept_activations()),
            Term("logits and loss", kept + working, f"vocabulary of {self.shape.facts.vocabulary_size:,}"),
            self._gathered(),
            self._accumulated(),
        ]

    def _backward(self) -> list[Term]:
        saved, again = self._saved()
        kept, _ = loss_bytes(self.shape, self.during)
        return [
            Term("activations", saved, self._kept_activations()),
            Term("logits and loss", kept, "gradient of the hidden states"),
            Term("computed again", again, "one layer of the checkpointed"),
            self._temporary(),
            self._unpacked(),
            self._gathered(),
            self._accumulated(),
            self._reduced(),
        ]

    def _backward_end(self) -> list[Term]:
        """All gradients are there; of the activations only one layer's."""
        layer = self._layer(0)
        pending = self.layers[0].trained_bytes // self.world_size if self.layers else 0
        return [
            Term("gradients", self.kept.gradients - pending, "of the trained weights, but for the first layer's"),
            Term("activations", layer.kept, "of one layer"),
            Term("temporary", layer.backward, "gradients inside one layer"),
            self._gathered(),
            self._reduced(),
        ]

    def _layer(self, number: int) -> Activations:
        """The costs of one layer."""
        return self._cost(self.layers[number], is_first=False) if self.layers else Activations(0, 0, 0, 0)

    def _cost(self, layer: Layer, *, is_first: bool) -> Activations:
        # Most layers of a model are equal.
        if (layer, is_first) not in self._costs:
            self._costs[layer, is_first] = layer_activations(layer, self.during, is_first=is_first)
        return self._costs[layer, is_first]

    def _reduced(self) -> Term:
        size = reduced_bytes(self.gathered, self.elements) if self.is_sharded else 0
        return Term("reduced gradients", size, "reduce-scatter of the largest unit")

    def _step(self) -> list[Term]:
        temporary = 0
        if self.plan.training.optimizer is not OptimizerName.ADAMW:
            # The fused update needs nothing; one over all tensors at once makes whole results in between.
            temporary = 2 * self.kept.trained_elements
        root = self.gathered[-1].gathered_bytes(self.elements.param) if self.is_sharded and not self.gathered[-1].name else 0
        return [
            Term("gradients", self.kept.gradients, "reduced"),
            self._ordered_sum(),
            Term("temporary", temporary, f"update of {self.plan.training.optimizer.value}"),
            Term("gathered weights", root, "the root, until it is gathered again"),
        ]

    def _ordered_sum(self) -> Term:
        """The gradients of this rank's virtual ranks next to the sum, and a part of those of all, sent and received."""
        values = self.shape.num_trained if self.is_ordered else 0
        rounds = -(-self.plan.parallelism.world_size // self.world_size)
        exchanged = (self.world_size + 1) * rounds * min(values, ORDERED_VALUES_AT_ONCE)
        return Term("ordered sum", 4 * (rounds * values + exchanged), "of the gradients of all ranks, as float32")

    def _snapshot(self) -> int:
        """A checkpoint that is waited for is written without one."""
        return self.kept.trained_elements + self._state_bytes() if self.plan.checkpoint.asynchronous else 0

    def _process(self) -> list[Term]:
        return [
            Term("checkpoint snapshot", self._snapshot(), "a copy that is written while training continues"),
            Term("process", HOST_BASE_BYTES, "Python, torch and their libraries (assumed)"),
        ]

    def _host(self) -> tuple[Term, ...]:
        if not self.work.on_gpu:
            return ()
        offloaded = self._shards() if self.plan.parallelism.fsdp.offload_params and self.is_sharded else []
        snapshot = Term("checkpoint snapshot", self._snapshot(), "pinned; the copy that is written while training continues")
        loaded = Term("base while it is loaded", self._read_whole(), WHOLE_BASE)
        base = Term("process", HOST_BASE_BYTES, "Python, torch and their libraries (assumed)")
        # The base has gone to the device, and its shards are where they stay, before the first checkpoint.
        moment = [loaded] if loaded.bytes > sum(term.bytes for term in (*offloaded, snapshot)) else [*offloaded, snapshot]
        return tuple(term for term in (*moment, base) if term.bytes)
