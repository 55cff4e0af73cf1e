"""Finds where a model's safetensors files store a parameter, given its name in transformers or PEFT.

Input: headers, config.json and the rules of the model type (families.py). Output: StoredModel, from which the planner and verify
get the stored tensors of a parameter.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.weights.errors import BrokenCheckpointError, UnsupportedBaseError
from finetune_trainer.weights.families import LEGACY_NAME_RULES, ModelFamily
from finetune_trainer.weights.headers import TensorHeader
from finetune_trainer.weights.name_rules import ExpertStack, Renaming, Unreadable, match_rule

EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json with the number of experts in a layer; which one is used depends on the model type."""
LAYER_COUNT_FIELDS = ("num_hidden_layers", "n_layer")
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class ExpertPart:
    """The part of PEFT's factors that belongs to one stored matrix. The factors cover all experts of a parameter."""

    expert: int
    num_experts: int
    first_row: int
    """Row of the expert's matrix in the model at which the stored matrix begins; for instance, up begins after gate."""
    zeros_before: int = 0
    """Number of zero-filled ranks that PEFT puts before the factors' own ranks when it fuses a projection's adapter with those of
    the other projections.
    """
    zeros_after: int = 0


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor and the place of its values in a parameter of the model."""

    header: TensorHeader
    expert: int | None = None
    """The expert whose rows the tensor holds. None: the tensor holds rows of the parameter itself."""
    first_row: int = 0
    """Row of that expert's matrix, or of the parameter, at which the tensor begins."""
    is_whole: bool = True
    """Whether the tensor holds all rows of the parameter, if `expert` is None."""

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Index of this part in the parameter's tensor: `tensor[part.place] = stored`."""
        if self.expert is None and self.is_whole:
            return ()  # also works for a scalar
        rows = slice(self.first_row, self.first_row + self.header.shape[0])
        return (rows,) if self.expert is None else (self.expert, rows)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of the model. Its parts cover every element exactly once."""

    path: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def dtype(self) -> str:
        """Name of the element type in safetensors headers, which all parts share."""
        return self.parts[0].header.dtype

    def expert_parts(self, part: StoredPart) -> tuple[ExpertPart, ...]:
        """Return, for each matrix of a stored part in order, the part of the whole parameter's adapter that belongs to it.

        A two-dimensional parameter counts as one expert, as in PEFT.
        """
        if len(self.shape) == 2:
            return (ExpertPart(0, 1, 0),)
        count = self.shape[0]
        if part.expert is not None:
            return (ExpertPart(part.expert, count, part.first_row),)
        return tuple(ExpertPart(expert, count, 0) for expert in range(count))


@dataclass(frozen=True)
class Tie:
    """Parameters of the model that share memory."""

    paths: tuple[str, ...]
    """Paths of the parameters. The first is the parameter to which the library ties the others."""
    stored: tuple[str, ...]
    """The subset of `paths` that the files hold. All have equal values, because parameters with different values are not tied."""

    @property
    def source(self) -> str:
        """The path under which the values of all these parameters are stored."""
        return self.stored[0]


@dataclass(frozen=True)
class ExpertProjection:
    """A projection of one expert, such as up or gate: a part of the expert's fused matrix, which may be stored alone."""

    parameter: StoredParameter
    expert: int
    index: int
    """Position among the expert's projections, in the order of their rows in the fused matrix."""
    count: int

    @property
    def part(self) -> StoredPart | None:
        """The stored tensor of this projection alone; None if the projection is stored within a stack."""
        parts = self.parameter.parts
        is_stored = len(parts) == self.parameter.shape[0] * self.count and self.expert < self.parameter.shape[0]
        return parts[self.expert * self.count + self.index] if is_stored else None


class StoredModel:
    """All parameters of a checkpoint."""

    def __init__(
        self, headers: Mapping[str, TensorHeader], config: Mapping[str, Any], family: ModelFamily, differing: Collection[str] = ()
    ) -> None:
        """differing: paths whose stored values differ from those of the parameter that they are tied to (read_model.py).

        Raises BrokenCheckpointError, which names the tensors, if tensors of experts are missing or do not fit each other.
        """
        self.family = family
        self._headers = headers
        self._rules = (*family.rules, *LEGACY_NAME_RULES)
        self._prefix = f"{family.prefix}." if family.prefix else ""
        self._unreadable: dict[str, Unreadable] = {}
        self._joined: dict[str, dict[int, TensorHeader]] = {}
        """Parameter that is joined from stored tensors -> these tensors, by the index of the source in the rule."""
        text_config = config.get("text_config") or {}
        counts = [source.get(key) for source in (config, text_config) for key in LAYER_COUNT_FIELDS]
        self._num_layers: int | None = next((count for count in counts if isinstance(count, int)), None)
        self._adds_prefix = bool(self._prefix) and not any(self._renamed(name).startswith(self._prefix) for name in headers)
        self._heads = frozenset(family.ties)
        self.parameters: Mapping[str, StoredParameter] = self._gather(headers, config)
        """Parameters by the model's own paths, in the order of the files."""
        self.ties: tuple[Tie, ...] = self._find_ties(family, differing) if family.is_tied(config) else ()
        self.num_rows: int | None = None
        """Number of rows of the embeddings if that is more than in the files, otherwise None; see `with_vocabulary`."""
        self._added: dict[str, StoredPart] = {}

    def parameter(self, path: str) -> StoredParameter | None:
        """Return the parameter with this name, possibly stored under the name of a tied parameter; None if the files lack it.

        path: PEFT's name without `base_model.model.`, in any library version's spelling. Raises UnsupportedBaseError if
        transformers computes the parameter from what is stored.
        """
        for candidate in self._spellings(path):
            if candidate in self._unreadable:
                operation = self._unreadable[candidate].operation
                raise UnsupportedBaseError(
                    f"base parameter {path}: transformers computes it from stored tensors by {operation}, and such tensors "
                    "cannot be merged into. Load the model with transformers, save it with save_original_format=False, and use "
                    "that copy as the base."
                )
            if candidate in self.parameters:
                return self.parameters[candidate]
            tie = self.tie(candidate)
            if tie is not None:
                return self.parameters[tie.source]
        return None

    def own_tensor(self, path: str) -> TensorHeader | None:
        """Return the stored tensor that holds exactly this parameter; None if there is none. Raises UnsupportedBaseError."""
        parameter = self.parameter(path)
        is_one_tensor = parameter is not None and len(parameter.parts) == 1 and parameter.parts[0].expert is None
        return parameter.parts[0].header if parameter is not None and is_one_tensor else None

    def readable(self, path: str) -> StoredParameter | None:
        """Return the parameter for reading its values, not for merging into it.

        The parameter may be joined from several tensors, and a model with its own code may have single experts where transformers
        has a stack. Raises UnsupportedBaseError.
        """
        joined = next((candidate for candidate in self._spellings(path) if candidate in self._joined), None)
        if joined is None or len(self._joined[joined]) != len(self._unreadable[joined].sources):
            stored, header = self.parameter(path), self._headers.get(path)
            if stored is not None and (added := self._added.get(stored.path)) is not None:
                return replace(stored, parts=(replace(stored.parts[0], is_whole=False), added))
            return stored if stored is not None or header is None else StoredParameter(path, header.shape, (StoredPart(header),))
        parts: list[StoredPart] = []
        num_rows = 0
        for _, header in sorted(self._joined[joined].items()):
            parts.append(StoredPart(header, first_row=num_rows, is_whole=False))
            num_rows += header.shape[0]
        return StoredParameter(joined, (num_rows, *parts[0].header.shape[1:]), tuple(parts))

    @property
    def embeddings(self) -> frozenset[str]:
        """Paths of parameters with a row for each token: input and output embeddings, and biases of output embeddings."""
        biases = (f"{path.removesuffix('.weight')}.bias" for path in self.family.ties)
        return frozenset((*self.family.ties, *self.family.ties.values(), *biases))

    def vocabulary(self) -> Mapping[str, StoredParameter]:
        """Return the embeddings that the files hold and that have as many rows as the input embeddings, by path."""
        stored = {path: self.parameters[path] for path in sorted(self.embeddings) if path in self.parameters}
        sizes = [stored[path].shape[0] for path in (*self.family.ties.values(), *self.family.ties) if path in stored]
        return {path: parameter for path, parameter in stored.items() if parameter.shape[:1] == tuple(sizes[:1])}

    def with_vocabulary(self, num_rows: int, saved: Mapping[str, TensorHeader]) -> StoredModel:
        """Return the model with `num_rows` rows in its embeddings, more than in the files, as after resize_token_embeddings.

        saved: tensors with all rows, by path; `readable` takes the rows that the files lack from these tensors.
        """
        grown = copy.copy(self)
        old = self.vocabulary()
        new = {path: replace(parameter, shape=(num_rows, *parameter.shape[1:])) for path, parameter in old.items()}
        grown.num_rows = num_rows
        grown.parameters = {**self.parameters, **new}
        grown._added = {}  # noqa: SLF001 - of this class
        for path, tensor in saved.items():
            first = old[path].shape[0]
            offset = tensor.offset + first * (tensor.num_bytes // tensor.shape[0])
            last_rows = replace(tensor, shape=(tensor.shape[0] - first, *tensor.shape[1:]), offset=offset)
            grown._added[path] = StoredPart(last_rows, first_row=first, is_whole=False)  # noqa: SLF001
        return grown

    def require_readable(self) -> None:
        """Check that every parameter of the trained model can be read. Raises UnsupportedBaseError for one that cannot."""
        for path in self._unreadable:
            if not self.is_extra(path):
                self.readable(path)

    def path(self, path: str) -> str:
        """Return the model's own spelling of a parameter's path, as in `parameters` and `ties`; an unknown path is unchanged."""
        return next((name for name in self._spellings(path) if name in self.parameters or self.tie(name)), path)

    def module(self, path: str) -> str:
        """Return the model's own spelling of a module's path, as far as the rules apply."""
        return self._model_path(self._renamed(f"{path}.weight")).removesuffix(".weight")

    def is_extra(self, path: str) -> bool:
        """Whether the trained model leaves out this stored parameter, for example one for images or multi-token prediction."""
        if self.family.part is not None:
            return path not in self.family.part
        number = _LAYER_NUMBER.search(path)
        return self._num_layers is not None and number is not None and int(number[1]) >= self._num_layers

    def projection(self, path: str) -> ExpertProjection | None:
        """Return the projection of a single expert at `path`, such as `...experts.3.w1.weight`; None for other paths."""
        renamed = self._renamed(path)
        for rule in self._rules:
            match = match_rule(rule, renamed) if isinstance(rule, ExpertStack) else None
            parameter = self.parameter(match.with_target(rule.target)) if match and isinstance(rule, ExpertStack) else None
            if match and parameter:
                return ExpertProjection(parameter, match.expert, match.source, len(rule.sources))
        return None

    def tie(self, path: str) -> Tie | None:
        """Return the tie of the parameter with this path in the model, or None."""
        return next((tie for tie in self.ties if path in tie.paths), None)

    def _spellings(self, path: str) -> tuple[str, ...]:
        renamed = self._renamed(path)
        with_prefix = f"{self._prefix}{renamed}" if self._prefix else renamed
        return tuple(dict.fromkeys((path, renamed, with_prefix)))

    def _renamed(self, name: str) -> str:
        for rule in self._rules:
            if isinstance(rule, Renaming):
                match = match_rule(rule, name)
                name = match.with_target(rule.target) if match else name
        return name

    def _model_path(self, renamed: str) -> str:
        return self._prefix + renamed if self._adds_prefix and renamed not in self._heads else renamed

    def _gather(self, headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> dict[str, StoredParameter]:
        single: dict[str, StoredParameter] = {}
        stacks: dict[str, tuple[ExpertStack, dict[tuple[int, int], TensorHeader]]] = {}
        order: dict[str, None] = {}
        for name, header in headers.items():
            renamed = self._renamed(name)
            applying = ((rule, match_rule(rule, renamed)) for rule in self._rules if not isinstance(rule, Renaming))
            rule, match = next(((rule, match) for rule, match in applying if match), (None, None))
            if match is None:
                path = self._model_path(renamed)
                path = name if path in single else path  # if the new name is taken, the library keeps the old name
                single[path] = StoredParameter(path, header.shape, (StoredPart(header),))
            elif isinstance(rule, ExpertStack):
                path = self._model_path(match.with_target(rule.target))
                stacks.setdefault(path, (rule, {}))[1][match.expert, match.source] = header
            elif isinstance(rule, Unreadable):
                for target in rule.targets:
                    path = self._model_path(match.with_target(target))
                    self._unreadable[path] = rule
                    if rule.joins_rows:
                        self._joined.setdefault(path, {})[match.source] = header
                continue
            order[path] = None
        counts = {value for key in EXPERT_COUNT_FIELDS if isinstance(value := config.get(key), int)}
        return {path: single[path] if path in single else _stack(path, *stacks[path], counts) for path in order}

    def _find_ties(self, family: ModelFamily, differing: Collection[str]) -> tuple[Tie, ...]:
        groups: dict[str, list[str]] = {}
        for target, source in family.ties.items():
            while source in family.ties:
                source = family.ties[source]
            groups.setdefault(source, [source]).append(target)
        ties = []
        for group in groups.values():
            paths = tuple(path for path in group if path not in differing)
            stored = tuple(path for path in paths if path in self.parameters)
            if stored and len(paths) > 1:
                ties.append(Tie(paths, stored))
        return tuple(ties)


def _stack(
    path: str, rule: ExpertStack, headers: Mapping[tuple[int, int], TensorHeader], counts: Collection[int]
) -> StoredParameter:
    """Join matrices of single experts into one parameter. Raises BrokenCheckpointError, which names what is missing or wrong."""
    num_experts = 1 + max(expert for expert, _ in headers)
    sources = range(len(rule.sources))
    missing = next(
        ((expert, source) for expert in range(num_experts) for source in sources if (expert, source) not in headers), None
    )
    if missing is not None:
        expert, source = missing
        raise BrokenCheckpointError(
            f"base parameter {path}: expert {expert} of {num_experts} has no tensor named like {rule.sources[source]!r}, as "
            f"{next(iter(headers.values())).name} requires. The model was saved or fetched incompletely; fetch it again."
        )
    first = [headers[0, source] for source in sources]
    for (_, source), header in headers.items():
        if len(header.shape) != 2 or header.shape[1] != first[0].shape[-1] or header.shape != first[source].shape:
            raise BrokenCheckpointError(
                f"base tensor {header.name}: shape {list(header.shape)} does not fit {first[source].name} of shape "
                f"{list(first[source].shape)} in {path}. Fetch the model again."
            )
        if header.dtype != first[0].dtype:
            raise BrokenCheckpointError(
                f"base tensor {header.name}: dtype {header.dtype}, but {first[0].name} has {first[0].dtype}, and both are "
                f"parts of {path}. Save the model in one dtype."
            )
    if counts and num_experts not in counts:
        raise BrokenCheckpointError(
            f"base parameter {path}: the files hold {num_experts} experts, config.json says {sorted(counts)}. Weights and "
            "configuration are of different models; fetch them again."
        )
    starts = [sum(header.shape[0] for header in first[:source]) for source in sources]
    parts = tuple(
        StoredPart(headers[expert, source], expert, starts[source]) for expert in range(num_experts) for source in sources
    )
    return StoredParameter(path, (num_experts, sum(header.shape[0] for header in first), first[0].shape[1]), parts)
