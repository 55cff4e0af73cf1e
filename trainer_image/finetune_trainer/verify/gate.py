"""Limits for the distance of a merged model's logits from base + adapter, and the verdict over measured figures.

In: figures and a VerificationGate. Out: the reasons why it fails, empty when it passes. Called by verification.py.

Where the thresholds come from. Base + adapter keeps B@A apart in fp32; the merged weight is rounded once to its dtype, a relative
error of at most u per weight (bfloat16 2**-8, float16 2**-11, float32 2**-24), and both models round their activations to the
same u. Logits are sums over thousands of such terms, so their errors are of the order of u times the largest logit, times a
factor for depth: 24 u for bfloat16 and float16. The Kullback-Leibler divergence grows with the square of the error, hence by 64
between bfloat16 and float16.

Single positions can be far worse conditioned than that: where what a layer adds nearly cancels what it is added to, or what a
norm then divides by is small, rounding alone changes the logits by much. So nine of ten positions are judged, not all, by
difference and by divergence: a merge that is wrong is wrong nearly everywhere. And one position with another most likely token is
excused, which may be more than 1% of them.

Measured with merges into random models (Llama, Qwen2, GPT-2, 256 wide; LoRA and DoRA on all linear layers; 2,000 tokens, 384
positions, two seeds of LoRA), as a range over the models of that depth:

layers 2 16 to 32 32, weights three times as large right merges: largest difference, of the largest logit bfloat16, float16, in u
1.7 to 2.7 2.9 to 7.0 5.0 to 12.8 nine positions of ten 1.3 to 2.0 2.5 to 4.3 4.0 to 9.2 float32 8 to 12 11 to 21 16 to 65 nine
positions of ten 6 to 9 8 to 14 13 to 39 mean divergence of all positions, bfloat16 4e-6 8e-6..2e-5 1.4e-4..7e-4 float16 6e-8
1.3e-7..3e-7 2e-6..1.1e-5 float32 2e-14 2e-14..3e-14 3e-13..3e-12 half the adapter, or none of it in the first layer bfloat16, in
u, nine positions of ten 30 to 84 64 to 178 147 to 214

and with an ill-conditioned one (Qwen3 of 2 layers, after 3 steps of LoRA+ in float16; 204 positions): base + adapter in float16
and the same in float32 are up to 0.08 of the largest logit apart, 0.0006 (1.2 u) at nine positions of ten; its right merge into
bfloat16 0.5, and 0.005 (1.4 u).

So a right merge uses at most two fifths of the first threshold and a seventh of the second, which leaves room for models of more
layers and for the larger extremes of more tokens. Eight-bit quantisation, which users see as lossless, has a mean divergence
around 1e-3.

If layers choose experts for each token, rounding sends one that is near a tie elsewhere, and its logits change by as much as
those experts differ. So the median position is judged there, by two thirds of the threshold. Measured in the same way (Mixtral
with 8 experts, 2 of them chosen; GPT-OSS with 16 and 4; random routers, which have far more ties than trained ones; 384
positions; bfloat16), right merges, and merges of half the adapter, as a range over 2 and 16 layers:

right half the adapter largest difference 0.06 to 0.72 0.21 to 0.68 of the largest logit at the median position 0.005 to 0.043
0.05 to 0.23 (0.081 with 16 layers of weights three times as large, which fail)
"""

from dataclasses import dataclass

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to nearest, by dtype."""
JUDGED_SHARE, JUDGED_SHARE_OF_EXPERTS = 0.9, 0.5
"""Share of positions, those with the smallest differences, that are judged; the second if layers choose experts."""
EXPERTS_ALLOWANCE = 2 / 3
"""Factor on max_relative_difference if layers choose experts."""
TIE_UNITS = 4
"""Tokens count as tied if their logits are at most this many unit roundoffs of the position's largest logit apart."""


@dataclass(frozen=True)
class LogitFigures:
    """Merged model against base + adapter over all positions of all prompts.

    mean_kl: KL(base + adapter || merged), nats per position, over the judged share of positions, those that diverge least.
    effect_mean_kl: the same of KL(base + adapter || base), the effect of the adapter at all. top1_agreement: share of positions
    whose most likely token under the merged model is the most likely one under base + adapter, or tied with it (TIE_UNITS).
    usual_abs_difference: the largest difference at the judged share of positions.
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
        """The judged difference over max_abs_logit."""
        return self.usual_abs_difference / self.max_abs_logit if self.max_abs_logit else self.usual_abs_difference

    @property
    def judged_positions(self) -> str:
        """The positions that the figures are about, in words."""
        return f"{judged_share(chooses_experts=self.chooses_experts):.0%} of positions"

    @property
    def judged(self) -> str:
        """The meaning of relative_difference, in words."""
        return f"largest difference of {self.judged_positions}"

    @property
    def num_disagreeing(self) -> float:
        """Number of positions with another most likely token; NaN if unknown."""
        return (1 - self.top1_agreement) * self.num_positions


def judged_share(*, chooses_experts: bool) -> float:
    """Share of positions whose differences are judged."""
    return JUDGED_SHARE_OF_EXPERTS if chooses_experts else JUDGED_SHARE


@dataclass(frozen=True)
class VerificationGate:
    """Thresholds that a merged model must all meet. Relative differences are those of LogitFigures."""

    max_relative_difference: float
    max_mean_kl: float
    min_top1_agreement: float
    max_kl_share_of_effect: float = 0.1
    """Limit of mean_kl over effect_mean_kl if the effect exceeds max_mean_kl: a copy of the base would have 1."""
    max_excused: int = 1
    """Number of positions that may have another most likely token, however few positions there are."""

    def allowed_difference(self, figures: LogitFigures) -> float:
        """Limit of the relative difference."""
        return self.max_relative_difference * (EXPERTS_ALLOWANCE if figures.chooses_experts else 1.0)


GATES = {
    "bfloat16": VerificationGate(
        max_relative_difference=24 * UNIT_ROUNDOFF["bfloat16"], max_mean_kl=5e-3, min_top1_agreement=0.97
    ),
    "float16": VerificationGate(max_relative_difference=24 * UNIT_ROUNDOFF["float16"], max_mean_kl=1e-4, min_top1_agreement=0.99),
    # Not 24 u: with so little rounding, the order of summation, which kernels choose, dominates.
    "float32": VerificationGate(max_relative_difference=1e-4, max_mean_kl=1e-7, min_top1_agreement=0.999),
}
LARGEST_MEASURED_KL = {"bfloat16": 7e-4, "float16": 1.1e-5, "float32": 3e-12}
"""Mean divergence of right merges, by dtype: the largest of the table above."""


def coarsest_dtype(*dtypes: str) -> str:
    """The element type whose gate holds: the coarsest in which either model is stored or runs.

    Raises ValueError for another dtype than bfloat16, float16 or float32.
    """
    for dtype in dtypes:
        if dtype not in GATES:
            raise ValueError(f"dtype {dtype!r}: gates are known for {sorted(GATES)}; pass a VerificationGate of your own.")
    return max(dtypes, key=UNIT_ROUNDOFF.__getitem__)


def gate_failures(figures: LogitFigures, gate: VerificationGate) -> tuple[str, ...]:
    """One sentence per exceeded threshold; NaN exceeds every threshold."""
    failures = []
    relative, allowed = figures.relative_difference, gate.allowed_difference(figures)
    if not relative <= allowed:
        failures.append(
            f"logits differ by up to {figures.max_abs_difference:.4g}; the {figures.judged} is {relative:.2g} of the largest "
            f"logit, and allowed is {allowed:.2g}"
        )
    if not figures.mean_kl <= gate.max_mean_kl:
        failures.append(
            f"mean KL divergence of {figures.judged_positions} is {figures.mean_kl:.3g}; allowed is {gate.max_mean_kl:.3g}"
        )
    # The number is computed from a share, so half a position is tolerated.
    is_excused = gate.max_excused > 0 and figures.num_disagreeing < gate.max_excused + 0.5
    if not figures.top1_agreement >= gate.min_top1_agreement and not is_excused:
        failures.append(
            f"the most likely token agrees at {figures.top1_agreement:.2%}; required is {gate.min_top1_agreement:.2%}"
        )
    has_effect = figures.effect_mean_kl > gate.max_mean_kl
    if has_effect and not figures.mean_kl <= gate.max_kl_share_of_effect * figures.effect_mean_kl:
        failures.append(
            f"the merged model is {figures.mean_kl / figures.effect_mean_kl:.0%} as far from base + adapter as the base "
            f"model is; allowed is {gate.max_kl_share_of_effect:.0%}"
        )
    return tuple(failures)
