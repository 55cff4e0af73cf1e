"""Small sizes for one part of a model: channels, heads and experts. They keep the relations that the layers rely on.

Widths of layers stay multiples of 64, because 4-bit quantisation packs blocks of 64 values. A small model keeps these relations
of the model: heads x channels of a head = channels of the stream, more query heads than key heads, low ranks, shared experts, and
the number of experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune_trainer.small_models.fields import MEANING_OF, NOT_A_WIDTH, WIDTH_LIKE, Meaning
from finetune_trainer.small_models.layers import is_by_layer

HEAD_SIZE, ROPE_SIZE = 32, 16
LEAST_WIDTH = 64
WIDTH = 128
FEED_FORWARD, EXPERT_FEED_FORWARD = 192, 64
HEADS, GROUPED_HEADS, KEY_VALUE_HEADS = 4, 2, 2
STATE_GROUPS = 2
LEARNED_POSITIONS = 512
"""The number of positions if positions are learned, or if masks over all of them are stored."""
FEWEST_EXPERTS, EXPERT_GROUPS, CHOSEN_GROUPS = 4, 4, 2
STATE_RANK_DIVISOR = 16
"""Mamba's `dt` rank is the number of channels divided by this, rounded up."""
_SIZES = {
    Meaning.RANK: LEAST_WIDTH,
    Meaning.LINEAR_HEAD_SIZE: HEAD_SIZE,
    Meaning.PLAIN_SIZE: HEAD_SIZE,
    Meaning.VALUE_SIZE: HEAD_SIZE,
    Meaning.ROPE_SIZE: ROPE_SIZE,
    Meaning.EXPERT_GROUPS: EXPERT_GROUPS,
    Meaning.CHOSEN_GROUPS: CHOSEN_GROUPS,
    Meaning.WINDOW: 16,
    Meaning.STATE: 16,
    Meaning.STATE_GROUPS: STATE_GROUPS,
    Meaning.CHUNK: 16,
    Meaning.LINEAR_KEY_HEADS: KEY_VALUE_HEADS,
}
"""Sizes that do not depend on other fields."""
_EXPANSIONS = ("expand", "mamba_expand")
_SMALL_COUNTS = {"index_n_heads": 2, "index_topk": 16, "index_block_size": 16, "index_topk_blocks": 2, "zero_expert_num": 2}
"""Small values for layers that choose which tokens to attend to, and for experts that pass a token on unchanged."""


def small_sizes(config: Mapping[str, Any], widths: Mapping[int, int]) -> dict[str, Any]:
    """Return the fields to change. `widths`: width of another part of the model -> its small width, for fields that repeat it."""
    sizes = _Sizes(config, widths)
    return {name: value for name, value in sizes.small().items() if value != config[name]}


def width_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of channels of the residual stream."""
    return _first(config, Meaning.WIDTH)


def _first(config: Mapping[str, Any], meaning: Meaning) -> int | None:
    for name, value in config.items():
        if MEANING_OF.get(name) is meaning and _is_count(value):
            return int(value)
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Sizes:
    def __init__(self, config: Mapping[str, Any], widths: Mapping[int, int]) -> None:
        self.config, self.widths = config, widths
        self.is_recurrent = "num_heads" in config and any(name in config for name in _EXPANSIONS)
        self.width = _first(config, Meaning.WIDTH)
        self.heads = _first(config, Meaning.HEADS) or (None if self.is_recurrent else _count(config.get("num_heads")))
        self.key_value_heads = _first(config, Meaning.KEY_VALUE_HEADS)
        self.has_low_ranks = _count(config.get("qk_rope_head_dim")) is not None
        explicit = None if self.is_recurrent else _first(config, Meaning.HEAD_SIZE)
        self.head_size = explicit or (self.width // self.heads if self.width and self.heads else None)
        self.small_heads, self.small_key_value_heads = self._heads()
        self.small_head_size = min(self.head_size, HEAD_SIZE) if self.head_size else HEAD_SIZE
        self.small_width = self._width()

    def _heads(self) -> tuple[int, int]:
        if self.heads is None:
            return HEADS, HEADS
        if self.key_value_heads is None or self.key_value_heads >= self.heads:
            heads = min(self.heads, HEADS)
            return heads, heads
        key_value = min(self.key_value_heads, KEY_VALUE_HEADS)
        return key_value * min(self.heads // self.key_value_heads, GROUPED_HEADS), key_value

    def _width(self) -> int:
        if self.width is None:
            return WIDTH
        inner = (self.heads or 0) * (self.head_size or 0)
        small_inner = self.small_heads * self.small_head_size
        if self.has_low_ranks or not inner:
            return min(self.width, WIDTH)
        if inner == self.width:
            if small_inner < LEAST_WIDTH:
                self.small_head_size = min(self.head_size or HEAD_SIZE, LEAST_WIDTH // self.small_heads)
            return min(self.width, self.small_heads * self.small_head_size)
        # If the heads' channels exceed the width in the original model, they do so here; otherwise the width exceeds them.
        return min(self.width, LEAST_WIDTH if inner > self.width and small_inner > LEAST_WIDTH else small_inner + LEAST_WIDTH)

    def small(self) -> dict[str, Any]:
        """Return the small value of every field that holds a size."""
        if self.width is not None and self.width <= WIDTH:
            return {}
        changed: dict[str, Any] = {}
        for name, value in self.config.items():
            if isinstance(value, list) and value and all(_is_count(size) or size == 0 for size in value):
                small = [self._field(name, size) if size else 0 for size in value]
                changed |= {name: small} if name in MEANING_OF else {}
            elif is_by_layer(name, value):
                changed[name] = {key: self._of_layer(own) for key, own in value.items() if isinstance(own, Mapping)}
            elif _is_count(value):
                changed[name] = self._field(name, value)
        return changed

    def _of_layer(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the small settings of a single layer. If every query head has its own key head, it keeps one."""
        small = {name: self._field(name, value) if _is_count(value) else value for name, value in own.items()}
        heads = _first(own, Meaning.HEADS)
        if heads is not None and heads == _first(own, Meaning.KEY_VALUE_HEADS):
            small |= {name: _first(small, Meaning.HEADS) for name in own if MEANING_OF.get(name) is Meaning.KEY_VALUE_HEADS}
        return small

    def _field(self, name: str, value: int) -> int:
        meaning = MEANING_OF.get(name)
        if name == "num_heads":
            meaning = Meaning.STATE_HEADS if self.is_recurrent else Meaning.HEADS
        if self.is_recurrent and name == "head_dim":
            meaning = Meaning.STATE_HEAD_SIZE
        if meaning is None:
            return self._unnamed(name, value)
        return min(value, self._known(name, value, meaning))

    def _whole_head_sizes(self) -> set[int]:
        """Return the sizes of low-rank heads (rotated plus plain channels): the common one, and those of individual layers."""
        rope = _count(self.config.get("qk_rope_head_dim"))
        layers = [own for name, value in self.config.items() if is_by_layer(name, value) for own in value.values()]
        sizes = [_count(part.get("qk_nope_head_dim")) for part in (self.config, *layers) if isinstance(part, Mapping)]
        return {size + rope for size in sizes if size} if rope else set()

    def _known(self, name: str, value: int, meaning: Meaning) -> int:
        config = self.config
        if meaning in _SIZES:
            return _SIZES[meaning]
        match meaning:
            case Meaning.WIDTH:
                return self.small_width
            case Meaning.HEADS:
                return self.small_heads if value == self.heads else min(value, HEADS)
            case Meaning.KEY_VALUE_HEADS:
                return self.small_key_value_heads if value == self.key_value_heads else min(value, KEY_VALUE_HEADS)
            case Meaning.HEAD_SIZE:
                if self.has_low_ranks and value == config["qk_rope_head_dim"]:
                    return ROPE_SIZE
                return HEAD_SIZE + ROPE_SIZE if value in self._whole_head_sizes() else self.small_head_size
            case Meaning.FEED_FORWARD:
                is_of_experts = "moe" in name or "expert" in name
                return EXPERT_FEED_FORWARD if is_of_experts else FEED_FORWARD
            case Meaning.EXPERTS:
                return self._experts()
            case Meaning.POSITIONS:
                return value if has_rope(config) else LEARNED_POSITIONS
            case Meaning.STATE_HEADS:
                return self._inner() // self._state_head_size()
            case Meaning.STATE_HEAD_SIZE:
                return self._state_head_size()
            case Meaning.STATE_WIDTH:
                return self._inner()
            case Meaning.LINEAR_VALUE_HEADS:
                keys = _count(config.get("linear_num_key_heads")) or value
                return KEY_VALUE_HEADS * min(value // keys, GROUPED_HEADS) if value >= keys else KEY_VALUE_HEADS
            case _:
                return value

    def _experts(self) -> int:
        chosen = _first(self.config, Meaning.CHOSEN_EXPERTS) or 1
        experts = max(FEWEST_EXPERTS, 2 * chosen)
        groups = min(_first(self.config, Meaning.EXPERT_GROUPS) or 1, EXPERT_GROUPS)
        if groups > 1:
            # The chosen groups must hold all experts of a token. Each group needs two, as some routers rank groups by two scores.
            experts = groups * max(2, -(-experts // groups), -(-chosen // CHOSEN_GROUPS))
        return experts

    def _state_head_size(self) -> int:
        size = _first(self.config, Meaning.STATE_HEAD_SIZE) or _count(self.config.get("head_dim")) or HEAD_SIZE
        return min(size, HEAD_SIZE)

    def _inner(self) -> int:
        """Return the number of channels inside a recurrent layer, in the same ratio to the stream as in the model."""
        config, width = self.config, self.width or WIDTH
        heads = _first(config, Meaning.STATE_HEADS) or _count(config.get("num_heads"))
        size = _first(config, Meaning.STATE_HEAD_SIZE) or _count(config.get("head_dim"))
        inner = heads * size if heads and size else _first(config, Meaning.STATE_WIDTH)
        if inner is None:
            inner = width * next((config[name] for name in _EXPANSIONS if _is_count(config.get(name))), 2)
        return max(HEAD_SIZE * STATE_GROUPS, round(inner / width * self.small_width / HEAD_SIZE) * HEAD_SIZE)

    def _unnamed(self, name: str, value: int) -> int:
        """Scale a field whose meaning is unknown, but which may repeat a width."""
        if name in _SMALL_COUNTS:
            return min(value, _SMALL_COUNTS[name])
        if name == "qk_head_dim" and self.has_low_ranks:
            return min(_count(self.config.get("qk_nope_head_dim")) or 0, HEAD_SIZE) + ROPE_SIZE
        if name == "rotary_dim" and self.head_size:
            return max(2, value * self.small_head_size // self.head_size // 2 * 2)
        if self.width is None:
            return self.widths.get(value, value) if WIDTH_LIKE.search(name) else value
        if name.endswith("_rank") and value == -(-self.width // STATE_RANK_DIVISOR):
            return -(-self.small_width // STATE_RANK_DIVISOR)
        if value < LEAST_WIDTH or not WIDTH_LIKE.search(name) or NOT_A_WIDTH.search(name):
            return value
        if value == self.width:
            return self.small_width
        if self.heads and self.head_size and value == self.heads * self.head_size:
            return self.small_heads * self.small_head_size
        if value == self.head_size:
            return self.small_head_size
        if value in self.widths:
            return self.widths[value]
        return min(value, max(LEAST_WIDTH, round(value * self.small_width / self.width / LEAST_WIDTH) * LEAST_WIDTH))


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None


def has_rope(config: Mapping[str, Any]) -> bool:
    """Whether positions are rotary, so that no table limits them."""
    return any(config.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))


def small_rope(value: Any, ratio: float) -> Any:
    """Cut lists in position settings, which have one number per pair of channels, to `ratio` of their length or sum."""
    if not isinstance(value, Mapping):
        return value
    changed = {}
    for name, setting in value.items():
        if isinstance(setting, Mapping):
            changed[name] = small_rope(setting, ratio)
        elif name in ("long_factor", "short_factor") and isinstance(setting, list):
            changed[name] = setting[: max(1, round(len(setting) * ratio))]
        elif name == "mrope_section" and isinstance(setting, list):
            changed[name] = _scaled_sum(setting, round(sum(setting) * ratio))
        else:
            changed[name] = setting
    return changed


def _scaled_sum(parts: list[int], total: int) -> list[int]:
    scaled = [max(1, part * total // max(sum(parts), 1)) for part in parts]
    scaled[0] += total - sum(scaled)
    return scaled
