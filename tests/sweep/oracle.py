"""Is a run that ended without an error right? Observed numbers in, what is wrong with them out.

Nothing here knows the rules. Bounds: in float32 those of rounding; with 16-bit types a multiple of what the plain run itself
loses when it is computed in the coarsest of the types.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor]
FLOAT32_BOUND = 3e-5
"""Relative L2 distance of a gradient from the plain one where all is float32: sums are taken in another order."""
NOISE_FACTOR = 8.0
"""How much farther than the plain run's own rounding a 16-bit gradient may be: another order of sums is another draw of the same
errors, and their tails are long. A gradient that is counted twice or divided by the ranks is off by half of its norm and more."""
FLOAT16_STEP = 2.0**-24
"""The smallest difference of two float16 numbers."""
FLOAT32_STEP = 2.0**-23
"""Of a float32 number: the largest distance to the next, over the number."""
FEW_ELEMENTS = 16
"""Up to so many elements of a tensor say little about how large the errors of each are: that of a sum that nearly cancels is one
draw, and a lucky one says nothing. Of these the same rounding is drawn again."""
_TINY = 1e-12


@dataclass
class Evidence:
    """What was compared."""

    problems: list[str] = field(default_factory=list)
    """What is silently wrong."""
    not_compared: list[str] = field(default_factory=list)
    """And why."""


def compare_names(found: Tensors, wanted: Tensors, what: str) -> list[str]:
    """Problems with which parameters are trained."""
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    return [
        f"{what}: {len(names)} {kind}, first {names[0]}"
        for kind, names in (("missing", missing), ("not expected", extra))
        if names
    ]


def has_few(tensor: torch.Tensor) -> bool:
    """Whether the rounding of this gradient is to be drawn again."""
    return tensor.numel() <= FEW_ELEMENTS


def compare_gradients(
    found: Tensors, exact: Tensors, coarse: Sequence[Tensors], reduce_bits: int | None, redrawn: Sequence[Tensors] = ()
) -> list[str]:
    """`exact`: the plain run's in float32; `coarse`: in each of the 16-bit types that take part.

    `reduce_bits`: mantissa bits of the type in which gradients are summed over ranks, where it is coarser than float32.
    `redrawn`: as `coarse`, rounded otherwise; they count for tensors of few elements.
    """
    noise = {
        name: max(
            (float((other[name] - wanted).norm()) for other in (*coarse, *(redrawn if has_few(wanted) else ()))), default=0.0
        )
        for name, wanted in exact.items()
    }
    norms = {name: float(gradient.norm()) for name, gradient in exact.items()}
    # The errors of a tensor are one draw; those of the same parameter of all layers together are more.
    alike: dict[str, float] = {}
    for name, error in noise.items():
        alike[_kind(name)] = max(alike.get(_kind(name), 0.0), error / max(norms[name], _TINY))
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    pooled = math.sqrt(sum(error**2 for error in noise.values())) / max(whole, _TINY)
    rounding = 0.0 if reduce_bits is None else 2.0**-reduce_bits
    if not math.isfinite(pooled):
        return ["the plain run itself is not finite"]
    problems = []
    for name, wanted in exact.items():
        gradient = found.get(name)
        if gradient is None:
            gradient = torch.zeros_like(wanted)
        if not bool(torch.isfinite(gradient).all()):
            problems.append(f"gradient of {name} is not finite")
            continue
        distance = float((gradient.float().view_as(wanted) - wanted).norm())
        relative_noise = pooled if redrawn and has_few(wanted) else max(pooled, min(alike[_kind(name)], 1.0))
        bound = (FLOAT32_BOUND + rounding + NOISE_FACTOR * relative_noise) * norms[name] + NOISE_FACTOR * noise[name]
        # Elements far below the others are lost in the sums that make them.
        bound += 1e-7 * whole
        if gradient.dtype is torch.float16:
            bound += FLOAT16_STEP * math.sqrt(gradient.numel())
        if distance > bound:
            relative = distance / max(norms[name], _TINY)
            problems.append(
                f"gradient of {name} is off by {relative:.2g} of its norm, bound {bound / max(norms[name], _TINY):.2g}"
            )
    return problems


def norm_bound(exact: Tensors, coarse: Sequence[Tensors], reduce_bits: int | None, found: Tensors) -> float:
    """How far the norm of all gradients may be from the plain one's, over it: by no more than the gradients themselves are."""
    whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in exact.values()))
    errors = [math.sqrt(sum(float((other[name] - wanted).norm()) ** 2 for name, wanted in exact.items())) for other in coarse]
    bound = FLOAT32_BOUND + NOISE_FACTOR * max(errors, default=0.0) / max(whole, _TINY)
    bound += 0.0 if reduce_bits is None else 2.0**-reduce_bits
    in_float16 = sum(gradient.numel() for gradient in found.values() if gradient.dtype is torch.float16)
    return bound + FLOAT16_STEP * math.sqrt(in_float16) / max(whole, _TINY)


def _kind(name: str) -> str:
    """A parameter's name without the numbers of layers."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def compare_values(found: Tensors, wanted: Tensors, relative: float, what: str) -> list[str]:
    """Element by element, relative to the largest of the tensor."""
    problems = []
    for name, expected in wanted.items():
        if name not in found:
            problems.append(f"{what}: {name} is missing")
            continue
        value = found[name].float()
        if value.shape != expected.shape:
            problems.append(f"{what}: {name} has shape {tuple(value.shape)}, not {tuple(expected.shape)}")
            continue
        bound = relative * float(expected.float().abs().max()) if expected.numel() else 0.0
        if relative and expected.dtype is torch.float16:
            bound += 3 * FLOAT16_STEP
        difference = float((value - expected.float()).abs().max()) if expected.numel() else 0.0
        if not difference <= bound:
            problems.append(f"{what}: {name} is off by {difference:.2g}, bound {bound:.2g}")
    return problems


def compare_bits(found: Tensors, wanted: Tensors, what: str) -> list[str]:
    """Both have the same tensors with the same bits."""
    problems = compare_names(found, wanted, what)
    different = [name for name in wanted if name in found and not torch.equal(found[name], wanted[name])]
    return [*problems, f"{what}: {len(different)} tensors differ, first {different[0]}"] if different else problems


def compare_logits(
    found: torch.Tensor, wanted: torch.Tensor, relative: float, what: str, redrawn: Sequence[torch.Tensor] = ()
) -> list[str]:
    """Each position (rows), relative to the largest of all.

    `redrawn`: the wanted ones after other roundings of the weights, which move an ill-conditioned position, or a token near a tie
    of two experts, by as much as this one may have. A merge that is wrong is wrong at the other positions, too.
    """
    if found.shape != wanted.shape:
        return [f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}"]
    largest = float(wanted.abs().max())
    bounds = torch.full(wanted.shape[:1], relative * largest)
    for other in redrawn:
        bounds = torch.maximum(bounds, NOISE_FACTOR * (other - wanted).abs().amax(dim=1))
    differences = (found - wanted).abs().amax(dim=1)
    if bool((differences <= bounds).all()):
        return []
    worst = int((differences / bounds.clamp(min=_TINY)).nan_to_num(math.inf).argmax())
    by, bound = (float(each[worst]) / max(largest, _TINY) for each in (differences, bounds))
    return [f"{what}: off by {by:.2g} of the largest, bound {bound:.2g}"]


def compare_losses(found: float, wanted: float, relative: float, what: str) -> list[str]:
    if math.isfinite(found) and abs(found - wanted) <= relative * abs(wanted):
        return []
    return [f"{what} is {found:.6g}, not {wanted:.6g}"]


def check_moved(before: Tensors, after: Tensors, gradients: Tensors, rate: float | None = None) -> list[str]:
    """Every parameter with a gradient other than zero has changed.

    rate: of optimizers whose first step is a gradient's multiple, by which; such a step may be smaller than a value's last bit.
    """
    still = [
        name
        for name, gradient in gradients.items()
        if name in before
        and bool((gradient.ne(0) if rate is None else rate * gradient.abs() > FLOAT32_STEP * before[name].abs()).any())
        and torch.equal(before[name], after[name])
    ]
    return [f"{len(still)} trained parameters did not move, first {still[0]}"] if still else []
