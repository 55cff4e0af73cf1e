"""What a run is measured by and the trainer decides, too, computed here a second time: documents and what of them is supervised,
the rates of the steps, and the norm by which gradients are clipped.

Nothing of the product is imported: what both had wrong would be taken for right.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

IGNORED = -100
TRAIN, HELD_OUT = (12, 1), (4, 2)
"""Sequences of a split of the sweep's data, and the seed that draws them (tests/support/tiny_model.py, prepared_split)."""
NUM_KNOWN = 257
"""Tokens of the sweep's tokenizer: 256 bytes, and one that ends texts."""
ADDED_EVERY = 24
"""Of bytes that differ by this in number the same added token takes the place."""
_UNSUPERVISED = 2
"""Tokens at the beginning of each document that are not to be learnt."""


@dataclass(frozen=True)
class Document:
    """One record, with the label of each token: itself, or IGNORED."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


Packed = tuple[Document, ...]
"""The documents of one sequence."""


def with_added(token: int, num_added: int) -> int:
    """What the data has in place of a byte if so many tokens are added."""
    return NUM_KNOWN + token % ADDED_EVERY if token % ADDED_EVERY < num_added else token


def sequences(split: tuple[int, int], *, packs: bool, num_added: int = 0) -> tuple[Packed, ...]:
    """The documents of each sequence of a split: up to three where they are packed, else one."""
    count, seed = split
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        documents = []
        for _ in range(int(draw.integers(1, 4 if packs else 2))):
            tokens = [with_added(int(token), num_added) for token in draw.integers(0, 256, int(draw.integers(5, 13)))]
            documents.append(Document(tuple(tokens), tuple([IGNORED] * _UNSUPERVISED + tokens[_UNSUPERVISED:])))
        found.append(tuple(documents))
    return tuple(found)


def share(steps: int, ratio: float) -> int:
    """A part of the steps in whole ones, rounded up; the ratio is what was written and not its nearest float."""
    return math.ceil(steps * Fraction(str(ratio)))


def rate(step: int, steps: int, *, peak: float, schedule: str, warmup: float, least: float = 0.0, decay: float = 0.0) -> float:
    """Learning rate of a step, counted from 0. warmup, decay: as parts of all steps; least: as a part of the peak.

    The warm-up rises evenly and ends at the peak. Then, with t of T steps done: Linear (T - t) / T; Cosine cos^2(pi t / 2T);
    InverseSqrt (w / (w + t))^(1/2) with w the steps of the warm-up, or 10,000; WarmupStableDecay falls evenly at the end.
    """
    rising = min(share(steps, warmup), steps - 1)
    if step < rising:
        return peak * (step + 1) / rising
    done, rest = step - rising, steps - rising
    if schedule == "Constant":
        height = 1.0
    elif schedule == "Linear":
        height = (rest - done) / rest
    elif schedule == "Cosine":
        height = math.cos(math.pi / 2 * done / rest) ** 2
    elif schedule == "InverseSqrt":
        scale = rising or 10_000
        height = (1 + done / scale) ** -0.5
    elif schedule == "WarmupStableDecay":
        falling = min(share(steps, decay), rest)
        height = 1.0 if rest - done >= falling else (rest - done) / falling
    else:
        raise ValueError(f"the sweep knows no schedule {schedule!r}; add it to tests/sweep/expected.py")
    return peak * (height + least * (1 - height))


def gradient_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """The Euclidean norm of all gradients together."""
    return math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))


def clipping(norm: float, largest: float) -> float:
    """What gradients of this norm are multiplied with; a largest norm of 0 clips nothing."""
    return min(1.0, largest / norm) if largest > 0 and norm > 0 else 1.0
