"""The configuration of a model -> that of its scaled-down model, and what was changed.

Works on any configuration whose fields have names that `fields` knows, parts of composite models included. Tokens that the
job names keep a row each. Whether the result can be built is for the libraries to say (search.py), which may ask again with some
fields kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_job.method_settings import TRAINED_ROWS_SETTING
from finetune_job.plan.method_plan import MethodPlan
from finetune_trainer.small_models.fields import MEANING_OF, TOKEN_ID, Meaning
from finetune_trainer.small_models.layers import KeptLayers, choose_layers, cut_layers
from finetune_trainer.small_models.sizes import small_rope, small_sizes, width_of

VOCABULARY = 512
_ODD = 64
"""The rest of the vocabulary's size by this stays: whether rows divide evenly among ranks matters."""
_ROPE = ("rope_parameters", "rope_scaling")
_LONGEST_SHOWN = 60
_LAYER_FIELDS = {name for name, meaning in MEANING_OF.items() if meaning is Meaning.LAYERS}
"""Setting of methods that train rows of an embedding."""


@dataclass(frozen=True)
class ConfigChange:
    """One thing that differs between the job and its rehearsal."""

    field: str
    before: Any
    after: Any

    def text(self) -> str:
        """For people."""
        return f"{self.field}: {_shown(self.before)} -> {_shown(self.after)}"


@dataclass(frozen=True)
class Tokens:
    """Where token ids of the model are in the scaled-down one."""

    size: int
    moved: Mapping[int, int] = field(default_factory=dict)

    def kept_token_of(self, token: int) -> int:
        """A token of the scaled-down model; tokens that the configuration or the job names have one of their own."""
        if token in self.moved:
            return self.moved[token]
        return token if 0 <= token < self.size else token % self.size


@dataclass(frozen=True)
class SmallConfig:
    """The configuration of a scaled-down model."""

    config: dict[str, Any]
    changes: tuple[ConfigChange, ...]
    layers: KeptLayers | None
    """Of the part that predicts text."""
    tokens: Tokens


def shrink(
    config: Mapping[str, Any], named_tokens: Collection[int] = (), kept: Collection[str] = (), of_each_kind: int = 1
) -> SmallConfig:
    """The scaled-down form of a configuration.

    `named_tokens`: ids that the job names; `kept`: fields, by path, that stay as they are; `of_each_kind`: layers, at least.
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
    changed: dict[str, Any] = _copied(config)
    for change in changes:
        *parents, last = change.field.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = change.after
    layers = choose_layers(parts[text], of_each_kind)
    if layers is not None and any(
        change.field.rpartition(".")[2] in _LAYER_FIELDS and change.field in kept for change in changes
    ):
        layers = None
    return SmallConfig(changed, tuple(changes), layers, tokens)


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with every dropout and jitter at zero, so that what is computed does not depend on who computes it."""
    changed: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            changed[name] = without_dropout(value)
        else:
            changed[name] = 0.0 if is_random(name, value) else value
    return changed


def is_random(name: str, value: Any) -> bool:
    """Whether a field makes training draw random numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return False
    return any(part in name for part in ("dropout", "pdrop", "layerdrop", "jitter", "drop_path"))


def has_dropout(config: Mapping[str, Any]) -> bool:
    """Whether any part of the model draws random numbers while it trains."""
    return bool(without_dropout(config) != _copied(config))


def _parts(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """This configuration and those inside it, by path."""
    yield path, config
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in _ROPE and any(MEANING_OF.get(str(inner)) for inner in value):
            yield from _parts(value, f"{path}.{name}" if path else name)


def _text_part(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Path of the part that predicts text."""
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
            yield from (each for each in (value if isinstance(value, list) else [value]) if type(each) is int)


def _moved_tokens(part: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for name, value in part.items():
        if not TOKEN_ID.search(name):
            continue
        if type(value) is int and value >= tokens.size:
            moved[name] = tokens.kept_token_of(value)
        elif isinstance(value, list) and all(type(each) is int for each in value):
            moved[name] = [tokens.kept_token_of(each) if each >= tokens.size else each for each in value]
    return moved


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def trained_token_ids(method: MethodPlan) -> list[int]:
    """Token ids that the method trains."""
    if method.lora is not None:
        return list(method.lora.trainable_token_indices)
    found = method.adapter.settings.get(TRAINED_ROWS_SETTING, []) if method.adapter is not None else []
    return [token for token in found if type(token) is int] if isinstance(found, list) else []
