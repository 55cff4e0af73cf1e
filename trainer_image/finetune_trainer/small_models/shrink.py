"""Scale down the configuration of a model, and list what was changed.

This works on any configuration whose fields have names that `fields` knows, including parts of composite models. Each token that
the job names keeps a row of its own. The result may fail to build; search.py then tries again with some fields unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from finetune_job.method_settings import TRAINED_ROWS_SETTING
from finetune_job.plan.method_plan import MethodPlan
from finetune_trainer.small_models.fields import MEANING_OF, TOKEN_ID, Meaning
from finetune_trainer.small_models.layers import KeptLayers, choose_layers, cut_layers
from finetune_trainer.small_models.sizes import has_rope, small_rope, small_sizes, width_of

VOCABULARY = 512
_ODD = 64
"""Both vocabulary sizes have the same remainder modulo this, since it matters whether ranks can divide the rows evenly."""
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter", "drop_path")
"""Parts of the names of fields that make training draw random numbers."""
LOW_THRESHOLD = 7
"""A number of tokens that even short rows exceed."""
_THRESHOLD = re.compile(r"position|window|attention_chunk|floor_scale|seq_len|context|n_ctx")
"""Matches the name of a field that may hold a number of tokens beyond which the model computes differently."""
_ROPE = ("rope_parameters", "rope_scaling")
_LONGEST_SHOWN = 60
_LAYER_FIELDS = {name for name, meaning in MEANING_OF.items() if meaning is Meaning.LAYERS}
"""Names of fields that count layers."""


@dataclass(frozen=True)
class ConfigChange:
    """A difference between the job and its rehearsal."""

    field: str
    before: Any
    after: Any

    def text(self) -> str:
        """Return the difference as text for users."""
        return f"{self.field}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True)
class Tokens:
    """The mapping from token ids of the model to those of the scaled-down one."""

    size: int
    moved: Mapping[int, int] = field(default_factory=dict)

    def kept_token_of(self, token: int) -> int:
        """Return the small model's token for `token`. Each token that the configuration or the job names keeps one of its own."""
        if token in self.moved:
            return self.moved[token]
        return token if 0 <= token < self.size else token % self.size


@dataclass(frozen=True)
class SmallConfig:
    """The configuration of a scaled-down model."""

    config: dict[str, Any]
    changes: tuple[ConfigChange, ...]
    layers: KeptLayers | None
    """The kept layers of the part that predicts text; None if that part keeps all of them, or does not state how many it has."""
    tokens: Tokens


def shrink(
    config: Mapping[str, Any], named_tokens: Collection[int] = (), kept: Collection[str] = (), of_each_kind: int = 1
) -> SmallConfig:
    """Return the scaled-down form of a configuration.

    `named_tokens`: ids that the job names; `kept`: paths of unchanged fields; `of_each_kind`: least number of layers of each
    kind.
    """
    parts = dict(_parts(config))
    text = _text_part(parts)
    tokens = _tokens(parts, text, named_tokens)
    widths: dict[int, int] = {}
    for path in sorted(parts, key=lambda path: path != text):
        width = width_of(parts[path])
        if width is not None:
            widths.setdefault(width, small_sizes(parts[path], {}).get(_width_field(parts[path]), width))
    changes: list[ConfigChange] = []
    for path, part in parts.items():
        layers = choose_layers(part, of_each_kind)
        small = small_sizes(part, widths)
        small |= cut_layers({**part, **small}, layers) if layers is not None else {}
        small |= _small_rope(part, small)
        small |= {name: tokens.size for name, value in part.items() if _is_vocabulary(name, value, tokens.size)}
        small |= _moved_tokens(part, tokens)
        prefix = f"{path}." if path else ""
        changes += [
            ConfigChange(f"{prefix}{name}", part[name], value)
            for name, value in small.items()
            if value != part[name] and f"{prefix}{name}" not in kept
        ]
    changed: dict[str, Any] = deepcopy(dict(config))
    for change in changes:
        *parents, last = change.field.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = change.after
    # If the text part keeps its number of layers, it keeps every layer at its index, so there is nothing to choose.
    has_all_layers = any(part == text and name in _LAYER_FIELDS for part, _, name in (path.rpartition(".") for path in kept))
    layers = None if has_all_layers else choose_layers(parts[text], of_each_kind)
    return SmallConfig(changed, tuple(changes), layers, tokens)


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without dropout and jitter, so that results do not depend on random numbers."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            changed[name] = without_dropout(value)
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            changed[name] = 0.0 if is_number and any(part in name for part in _RANDOM) else value
    return changed


def with_low_thresholds(config: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return the configuration, in which LOW_THRESHOLD replaces each position threshold that rows of `longest` tokens exceed."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            changed[name] = with_low_thresholds(value, longest)
        else:
            is_exceeded = type(value) in (int, float) and LOW_THRESHOLD < value < longest and _THRESHOLD.search(name)
            is_table = MEANING_OF.get(name) is Meaning.POSITIONS and not has_rope(config)
            changed[name] = LOW_THRESHOLD if is_exceeded and not is_table else value
    return changed


def _parts(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield this configuration and the configurations inside it, each with its path."""
    yield path, config
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in _ROPE and any(MEANING_OF.get(str(inner)) for inner in value):
            yield from _parts(value, f"{path}.{name}" if path else name)


def _text_part(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the path of the part that predicts text."""
    named = [path for path in parts if path.rpartition(".")[2] in ("text_config", "llm_config", "language_config")]
    if named:
        return named[0]
    return next((path for path, part in parts.items() if "vocab_size" in part), "")


def _width_field(part: Mapping[str, Any]) -> str:
    return next(name for name in part if MEANING_OF.get(name) is Meaning.WIDTH and part[name])


def _small_rope(part: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    head = {name: value for name, value in part.items() if MEANING_OF.get(name) is Meaning.HEAD_SIZE and value}
    if head:
        name = next(iter(head))
        before, after = head[name], small.get(name, head[name])
    else:
        width, heads = width_of(part), _heads(part)
        if not width or not heads:
            return {}
        before, after = width // heads, small.get(_width_field(part), width) // (_heads({**part, **small}) or heads)
    return {name: small_rope(part[name], after / before) for name in _ROPE if part.get(name)}


def _heads(part: Mapping[str, Any]) -> int | None:
    return next((value for name, value in part.items() if MEANING_OF.get(name) is Meaning.HEADS and value), None)


def _is_vocabulary(name: str, value: Any, size: int) -> bool:
    return MEANING_OF.get(name) is Meaning.VOCABULARY and isinstance(value, int) and value > size


def _tokens(parts: Mapping[str, Mapping[str, Any]], text: str, named: Collection[int]) -> Tokens:
    size = parts[text].get("vocab_size")
    if not isinstance(size, int):
        return Tokens(1 << 31)
    special = {token for part in parts.values() for token in _special_tokens(part)}
    wanted = sorted({token for token in {*special, *named} if 0 <= token < size})
    room = -(-(VOCABULARY + 2 * len(wanted)) // _ODD) * _ODD + size % _ODD
    if size <= room:
        return Tokens(size)
    taken = {token for token in wanted if token < room}
    free = (token for token in range(room - 1, -1, -1) if token not in taken)
    return Tokens(room, {token: next(free) for token in wanted if token >= room})


def _special_tokens(part: Mapping[str, Any]) -> Iterator[int]:
    for name, value in part.items():
        if TOKEN_ID.search(name):
            yield from (token for token in (value if isinstance(value, list) else [value]) if type(token) is int)


def _moved_tokens(part: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for name, value in part.items():
        if not TOKEN_ID.search(name):
            continue
        if type(value) is int and value >= tokens.size:
            moved[name] = tokens.kept_token_of(value)
        elif isinstance(value, list) and all(type(token) is int for token in value):
            moved[name] = [tokens.kept_token_of(token) if token >= tokens.size else token for token in value]
    return moved


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def trained_token_ids(method: MethodPlan) -> list[int]:
    """Return the token ids that the method trains."""
    if method.lora is not None:
        return list(method.lora.trainable_token_indices)
    rows = method.adapter.settings.get(TRAINED_ROWS_SETTING, []) if method.adapter is not None else []
    return [token for token in rows if type(token) is int] if isinstance(rows, list) else []
