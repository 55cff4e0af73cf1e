"""Limits how far a merged model's logits may be from those of base + adapter, and judges measured figures by these limits.

Input: figures and a VerificationGate. Output: the reasons why the model fails; none if it passes. Called by verification.py.

docs/explanation/decisions/0005-merge-in-two-names.md explains where the thresholds come from and what was measured.
"""

from dataclasses import dataclass

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to nearest, by dtype."""
JUDGED_SHARE, JUDGED_SHARE_OF_EXPERTS = 0.9, 0.5
"""Share of positions that are judged: those with the smallest differences. The second value is for mixtures of experts."""
EXPERTS_ALLOWANCE = 2 / 3
"""Factor on max_relative_difference for mixtures of experts."""
TIE_UNITS = 4
"""Maximum distance between the logits of tied tokens, in unit roundoffs of the position's largest logit."""


@dataclass(frozen=True)
class LogitFigures:
    """Figures that compare a merged model with base + adapter, over all positions of all prompts.

    mean_kl: mean of KL(base + adapter || merged) in nats, over the judged share of positions: those that diverge least.
    effect_mean_kl: the same mean of KL(base + adapter || base), which is the adapter's effect. top1_agreement: share of positions
    at which both find the same token most likely, or tied tokens (TIE_UNITS). usual_abs_difference: the largest difference at the
    judged positions.
    """

    num_prompts: int
    num_positions: int
    max_abs_difference: float
    usual_abs_difference: float
    max_abs_logit: float
    mean_kl: float
    effect_mean_kl: float
    top1_agreement: float
    chooses_experts: bool = False

    @property
    def relative_difference(self) -> float:
        """The ratio of usual_abs_difference to max_abs_logit."""
        return self.usual_abs_difference / self.max_abs_logit if self.max_abs_logit else self.usual_abs_difference

    @property
    def judged_positions(self) -> str:
        """The share of positions that the figures cover, in words."""
        return f"{judged_share(chooses_experts=self.chooses_experts):.0%} of positions"

    @property
    def judged(self) -> str:
        """The meaning of relative_difference, in words."""
        return f"largest difference of {self.judged_positions}"

    @property
    def num_disagreeing(self) -> float:
        """Number of positions at which the most likely tokens differ; NaN if unknown."""
        return (1 - self.top1_agreement) * self.num_positions


def judged_share(*, chooses_experts: bool) -> float:
    """Return the share of positions whose differences are judged."""
    return JUDGED_SHARE_OF_EXPERTS if chooses_experts else JUDGED_SHARE


@dataclass(frozen=True)
class VerificationGate:
    """Thresholds, all of which a merged model must meet. They limit the figures in LogitFigures."""

    max_relative_difference: float
    max_mean_kl: float
    min_top1_agreement: float
    max_kl_share_of_effect: float = 0.1
    """Limit of the ratio of mean_kl to effect_mean_kl, if the effect exceeds max_mean_kl. A copy of the base has the ratio 1."""
    max_excused: int = 1
    """Number of positions at which the most likely tokens may differ, however few positions there are.

    0 if a user has set min_top1_agreement. Otherwise, agreement at the share that PEFT's own merged model reaches is also enough.
    """

    def allowed_difference(self, figures: LogitFigures) -> float:
        """Return the limit of the relative difference."""
        return self.max_relative_difference * (EXPERTS_ALLOWANCE if figures.chooses_experts else 1.0)


GATES = {
    "bfloat16": VerificationGate(
        max_relative_difference=24 * UNIT_ROUNDOFF["bfloat16"], max_mean_kl=5e-3, min_top1_agreement=0.97
    ),
    "float16": VerificationGate(max_relative_difference=24 * UNIT_ROUNDOFF["float16"], max_mean_kl=1e-4, min_top1_agreement=0.99),
    # Not 24 roundoffs: rounding is so small here that differences come mostly from the order in which kernels add terms.
    "float32": VerificationGate(max_relative_difference=1e-4, max_mean_kl=1e-7, min_top1_agreement=0.999),
}
LARGEST_MEASURED_KL = {"bfloat16": 7e-4, "float16": 1.1e-5, "float32": 3e-12}
"""Largest mean divergence that was measured for correct merges, by dtype."""


def coarsest_dtype(*dtypes: str) -> str:
    """Return the coarsest of these element types, whose gate applies.

    Raises ValueError for a dtype other than bfloat16, float16 or float32.
    """
    for dtype in dtypes:
        if dtype not in GATES:
            raise ValueError(f"dtype {dtype!r}: gates are known for {sorted(GATES)}; pass a VerificationGate of your own.")
    return max(dtypes, key=UNIT_ROUNDOFF.__getitem__)


def gate_failures(figures: LogitFigures, gate: VerificationGate) -> tuple[str, ...]:
    """Return one sentence for each exceeded threshold; NaN exceeds every threshold."""
    failures = []
    relative, allowed = figures.relative_difference, gate.allowed_difference(figures)
    if not relative <= allowed:
        failures.append(
            f"logits differ by up to {figures.max_abs_difference:.4g}; the {figures.judged} is {relative:.2g} of the largest "
            f"logit; the limit is {allowed:.2g}"
        )
    if not figures.mean_kl <= gate.max_mean_kl:
        failures.append(
            f"mean KL divergence of {figures.judged_positions} is {figures.mean_kl:.3g}; the limit is {gate.max_mean_kl:.3g}"
        )
    # The number is computed from a share, so half a position is tolerated.
    is_excused = gate.max_excused > 0 and figures.num_disagreeing < gate.max_excused + 0.5
    if not figures.top1_agreement >= gate.min_top1_agreement and not is_excused:
        failures.append(
            f"the most likely token agrees at {figures.top1_agreement:.2%}; the minimum is {gate.min_top1_agreement:.2%}"
        )
    has_effect = figures.effect_mean_kl > gate.max_mean_kl
    if has_effect and not figures.mean_kl <= gate.max_kl_share_of_effect * figures.effect_mean_kl:
        failures.append(
            f"the merged model's distance from base + adapter is {figures.mean_kl / figures.effect_mean_kl:.0%} of the base "
            f"model's; the limit is {gate.max_kl_share_of_effect:.0%}"
        )
    return tuple(failures)


def gate_rows(logits: LogitFigures, gate: VerificationGate) -> list[tuple[str, str, str]]:
    """List each figure with its measured value and its threshold, as text for tables."""
    share = f"{logits.mean_kl / logits.effect_mean_kl:.2%}" if logits.effect_mean_kl else "no effect"
    return [
        (
            f"{logits.judged}, of the largest logit",
            f"{logits.relative_difference:.3g}",
            f"at most {gate.allowed_difference(logits):.3g}",
        ),
        ("largest difference", f"{logits.max_abs_difference:.4g}", f"largest logit {logits.max_abs_logit:.4g}"),
        (f"mean KL divergence of {logits.judged_positions}, nats", f"{logits.mean_kl:.3g}", f"at most {gate.max_mean_kl:.3g}"),
        ("same most likely token", f"{logits.top1_agreement:.3%}", f"at least {gate.min_top1_agreement:.2%}"),
        ("KL divergence of the base, nats (the adapter's effect)", f"{logits.effect_mean_kl:.3g}", ""),
        (
            "mean KL divergence, of the adapter's effect",
            share,
            f"at most {gate.max_kl_share_of_effect:.0%} if the effect exceeds {gate.max_mean_kl:.3g}",
        ),
    ]
