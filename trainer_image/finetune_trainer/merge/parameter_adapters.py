"""Finds the changes that adapters make to parameters instead of modules (PEFT's target_parameters), mostly to fused experts.

PEFT 0.21.2 wraps a module once for each of its adapted parameters, and the names of tensors show the nesting: with gate_up and
down adapted, `experts.lora_A.weight` belongs to down, which was wrapped last, and `experts.base_layer.lora_A.weight` to gate_up
(tuners/tuners_utils.py, `_inject_parameters`). Adapters of older versions hold factors of single experts, which PEFT fuses when
it loads them (utils/transformers_weight_conversion.py). Both are merged bit-identically to PEFT.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_job.methods import INSIDE_PEFT
from finetune_trainer.merge.adapter_settings import AdapterSettings
from finetune_trainer.merge.changes import LowRank, Orientation
from finetune_trainer.merge.factors import check_shapes
from finetune_trainer.weights.errors import AdapterTensorError, TiedWeightsError, UnsupportedAdapterError, UnsupportedBaseError
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.stored import ExpertPart, ExpertProjection, StoredModel, StoredParameter

PARAMETER_ORDER = (
    "w1", "v1", "w2", "gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias",
)  # fmt: skip
"""Order in which modules of transformers 5.23 register parameters of these names, which decides how PEFT nests its wrappers."""
ROUTER = "gate"
"""Name of the router in models whose old adapters PEFT converts. Routers used to be linear layers; now they hold a parameter."""

_FACTOR = re.compile(rf"{re.escape(INSIDE_PEFT)}(?P<module>.+?)(?P<nest>(?:\.base_layer)*)\.lora_(?P<factor>[AB])\.weight")

WrapperKey = tuple[str, int]
"""The module's path in the model, and the number of wrappers around the adapter."""


@dataclass(frozen=True)
class MatrixChange:
    """The change that an adapter makes to one matrix of a stored tensor."""

    path: str
    """Path of the parameter in the model."""
    stored: TensorHeader
    matrix: int
    """Index of the matrix in a stored stack of experts; 0 if the tensor is not a stack."""
    change: LowRank


@dataclass
class ParameterChanges:
    """All changes that an adapter makes to parameters, and the names of the adapter tensors that these changes use."""

    changes: list[MatrixChange] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    """Paths of the changed parameters in the model."""


@dataclass
class _FactorPair:
    """The factors A and B of one wrapper."""

    module: str
    """Name of the module in the adapter."""
    factors: dict[str, TensorHeader] = field(default_factory=dict)

    def both(self) -> tuple[TensorHeader, TensorHeader]:
        """Return A and B. Raises AdapterTensorError if one is missing."""
        for letter in "AB":
            if letter not in self.factors:
                other = next(iter(self.factors.values())).name
                raise AdapterTensorError(f"adapter tensor lora_{letter} is missing for {other}. Save the adapter again.")
        return self.factors["A"], self.factors["B"]


def parameter_changes(stored: StoredModel, adapter: Mapping[str, TensorHeader], settings: AdapterSettings) -> ParameterChanges:
    """Return the changes made by the adapter tensors that belong to parameters. The other tensors belong to modules.

    Raises AdapterTensorError, TiedWeightsError, UnsupportedAdapterError, UnsupportedBaseError.
    """
    result = ParameterChanges()
    pairs: dict[WrapperKey, _FactorPair] = {}
    for name, tensor in adapter.items():
        match = _FACTOR.fullmatch(name)
        if match:
            key = stored.module(match["module"]), match["nest"].count(".")
            pairs.setdefault(key, _FactorPair(match["module"])).factors[match["factor"]] = tensor
    targeted = _targeted(stored, settings, pairs)
    if targeted and settings.use_dora:
        raise UnsupportedAdapterError(
            f"adapter_config.json: use_dora with target_parameters {list(settings.target_parameters)!r}, which PEFT cannot "
            "compute. Train without one of them."
        )
    for module, parameters in targeted.items():
        for depth, parameter in enumerate(reversed(parameters)):
            pair = pairs.pop((module, depth), None)
            if pair is None:
                raise AdapterTensorError(
                    f"the adapter holds no tensor {INSIDE_PEFT}{module}{'.base_layer' * depth}.lora_A.weight, although "
                    f"target_parameters {list(settings.target_parameters)!r} covers {parameter.path}: the adapter was saved "
                    "incompletely. Save it again from all ranks."
                )
            _add(result, stored, parameter, pair.both(), settings)
    _add_single_experts(result, stored, pairs, settings)
    return result


def _targeted(
    stored: StoredModel, settings: AdapterSettings, pairs: Mapping[WrapperKey, _FactorPair]
) -> dict[str, list[StoredParameter]]:
    """Return the adapted parameters of each module, in the order in which the module registers them."""
    targeted: dict[str, list[StoredParameter]] = defaultdict(list)
    for path, parameter in stored.parameters.items():
        module, _, name = path.rpartition(".")
        is_old_router = (
            stored.family.peft_fuses_experts and module.endswith(f".{ROUTER}") and name == "weight" and (module, 0) in pairs
        )
        if (settings.targets_parameter(path) or is_old_router) and not stored.is_extra(path):
            targeted[module].append(parameter)
    for module, parameters in targeted.items():
        for parameter in parameters:
            tie = stored.tie(parameter.path)
            if tie is not None:
                raise TiedWeightsError(
                    f"adapter_config.json: target_parameters cover {parameter.path}, which shares its memory with {tie.paths}. "
                    "PEFT changes one of them in training and all of them in a merge. Untie them before training, or remove the "
                    "parameter from target_parameters."
                )
        names = [parameter.path.rpartition(".")[2] for parameter in parameters]
        if len(names) == 1:
            continue
        if not set(names) <= set(PARAMETER_ORDER):
            raise UnsupportedAdapterError(
                f"adapter_config.json: target_parameters cover {names} of {module}; the order in which PEFT nests adapters is "
                f"known only for {list(PARAMETER_ORDER)}. Adapt one parameter of a module at a time."
            )
        parameters.sort(key=lambda parameter: PARAMETER_ORDER.index(parameter.path.rpartition(".")[2]))
    return dict(targeted)


def _add(
    result: ParameterChanges,
    stored: StoredModel,
    parameter: StoredParameter,
    factors: tuple[TensorHeader, TensorHeader],
    settings: AdapterSettings,
) -> None:
    """Add an adapter on a whole parameter. factors: A (experts * r, in) and B (out, r * experts)."""
    a, b = factors
    shape = parameter.shape
    if len(shape) not in (2, 3):
        raise UnsupportedAdapterError(
            f"adapter tensor {a.name}: adapts {parameter.path} of shape {list(shape)}; parameters need two or three dimensions."
        )
    num_experts = shape[0] if len(shape) == 3 else 1
    is_transposed = len(shape) == 3 and stored.family.has_transposed_experts
    if is_transposed and num_experts == 1:
        raise UnsupportedAdapterError(
            f"adapter tensor {a.name}: {parameter.path} is a single expert that is stored as (in, out), for which PEFT cannot "
            "merge an adapter. Publish the adapter alone (merge.enabled: false)."
        )
    orientation = Orientation.CONV1D if is_transposed else Orientation.LINEAR
    num_out, num_in = (shape[-1], shape[-2]) if is_transposed else (shape[-2], shape[-1])
    rank = settings.rank(parameter.path)
    expected = {"A": (num_experts * rank, num_in), "B": (num_out, rank * num_experts)}
    check_shapes({"A": a, "B": b}, expected, parameter.path)
    for part in parameter.parts:
        for matrix, expert_part in enumerate(parameter.expert_parts(part)):
            change = LowRank(a, b, None, settings.scaling(parameter.path), orientation, expert_part)
            result.changes.append(MatrixChange(parameter.path, part.header, matrix, change))
    result.used |= {a.name, b.name}
    result.paths.add(parameter.path)


def _add_single_experts(
    result: ParameterChanges, stored: StoredModel, pairs: Mapping[WrapperKey, _FactorPair], settings: AdapterSettings
) -> None:
    """Add adapters on single projections of single experts, which PEFT fuses: A (r, in), B (rows of the projection, r)."""
    fused: dict[str, dict[tuple[int, int], tuple[ExpertProjection, _FactorPair]]] = defaultdict(dict)
    for (_, depth), pair in pairs.items():
        projection = stored.projection(f"{pair.module}.weight") if depth == 0 else None
        if projection is not None:
            fused[projection.parameter.path][projection.expert, projection.index] = projection, pair
    for path, members in fused.items():
        _require_fusable(stored, path, members, settings)
        result.paths.add(path)
        for projection, pair in members.values():
            part, (a, b) = projection.part, pair.both()
            if part is None:
                raise UnsupportedBaseError(
                    f"adapter tensor {a.name}: adapts one projection of one expert, but the base stores {path} as one tensor. "
                    "Use the published base, which has a tensor for each expert, or load the adapter with PEFT 0.21 and save it "
                    "again."
                )
            rank = settings.rank(pair.module)
            expected = {"A": (rank, part.header.shape[1]), "B": (part.header.shape[0], rank)}
            check_shapes({"A": a, "B": b}, expected, part.header.name)
            others = projection.count - 1 - projection.index
            expert_part = ExpertPart(0, 1, 0, zeros_before=projection.index * rank, zeros_after=others * rank)
            change = LowRank(a, b, None, settings.scaling(pair.module), Orientation.LINEAR, expert_part)
            result.changes.append(MatrixChange(path, part.header, 0, change))
            result.used |= {a.name, b.name}


def _require_fusable(
    stored: StoredModel,
    path: str,
    members: Mapping[tuple[int, int], tuple[ExpertProjection, _FactorPair]],
    settings: AdapterSettings,
) -> None:
    """Raise an error for factors that PEFT cannot fuse, or fuses into an adapter that differs from the trained one."""
    projection, pair = next(iter(members.values()))
    example = pair.both()[0].name
    refusal = f"adapter tensor {example}: adapts one projection of one expert, which PEFT 0.21 "
    advice = "Publish the adapter alone (merge.enabled: false)."
    if not stored.family.peft_fuses_experts:
        raise UnsupportedAdapterError(f"{refusal}does not load for this model type. {advice}")
    if settings.use_dora:
        raise UnsupportedAdapterError(f"{refusal}fuses over all experts, and DoRA is not supported there. {advice}")
    if settings.use_rslora and projection.count > 1:
        raise UnsupportedAdapterError(
            f"{refusal}fuses with a rank {projection.count} times as large, so rsLoRA's division by the root of the rank "
            f"gives a different scaling from that in training. {advice}"
        )
    for expert in range(projection.parameter.shape[0]):
        for index in range(projection.count):
            if (expert, index) not in members:
                raise AdapterTensorError(
                    f"the adapter holds no tensor for projection {index} of expert {expert} of {path}, although it holds "
                    f"{example}: PEFT fuses all experts or none. Save the adapter again from all ranks."
                )
    plain = (settings.r, settings.lora_alpha / settings.r)
    for _, member in members.values():
        trained = settings.rank(member.module), settings.scaling(member.module)
        loaded = settings.rank(path), settings.scaling(path)
        if trained != loaded or (projection.count > 1 and trained != plain):
            raise UnsupportedAdapterError(
                f"{refusal}fuses without regard to rank_pattern and alpha_pattern, which give {member.module} rank {trained[0]} "
                f"and scaling {trained[1]}. {advice}"
            )
