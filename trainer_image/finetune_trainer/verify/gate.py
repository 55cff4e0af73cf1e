"""PURE. How far a merged model's logits may be from base + adapter, and the verdict over measured figures.

In: figures and a Gate. Out: the reasons why it fails, empty when it passes. Called by run.py.

Where the thresholds come from. Base + adapter keeps B@A apart in fp32; the merged weight is rounded once to its dtype,
a relative error of at most u per weight (bfloat16 2**-8, float16 2**-11, float32 2**-24), and both models round their
activations to the same u. Logits are sums over thousands of such terms, so their errors are of the order of u times the
largest logit, times a factor for depth: 32 u for bfloat16 and float16. The Kullback-Leibler divergence grows with the square
of the error, hence by 64 between bfloat16 and float16.

Measured with correct merges into random models (Llama, Qwen2, GPT-2; LoRA and DoRA on all linear layers; 2,000 tokens, 384
positions, two seeds each), as a range over the models of that depth:

    layers                     2             16 to 32      32, weights three times as large
    bfloat16, float16: largest difference, in u of the largest logit
                               2.1 to 2.7    1.9 to 6.7    7.8 to 10.7
    float32                    9 to 13       8 to 20       26 to 45
    mean divergence, bfloat16  0.9e-6..1e-6  0.5e-6..2e-5  9e-5..1e-4
                     float16   1e-8..2e-8    8e-9..2e-7    1e-6..2e-6
                     float32   5e-15         1e-15..3e-14  2e-13..3e-13
    divergence over that of the base: at most 1.6e-3 in bfloat16, 2.5e-5 in float16; same most likely token: at least 99.7%

So a right merge uses at most a third of the first threshold and a fiftieth of the second, which leaves room for models of more
layers and for the larger extremes of more positions and tokens. Eight-bit quantisation, which users see as lossless, has a mean
divergence around 1e-3.

Where layers choose experts for each token, rounding sends one that is near a tie elsewhere, and its logits change by as much as
those experts differ. So the median position is judged there instead of the largest difference, by half the threshold. Measured in
the same way (Mixtral with 8 experts, 2 of them chosen; GPT-OSS with 16 and 4; random routers, which have far more ties than trained
ones; 384 positions; bfloat16), right merges, and merges of half the adapter, as a range over 2 and 16 layers:

                               right            half the adapter
    largest difference         0.06 to 0.72     0.21 to 0.68    of the largest logit
    at the median position     0.005 to 0.043   0.05 to 0.23    (0.081 with 16 layers of weights three times as large, which fail)
"""

from dataclasses import dataclass

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to nearest, by dtype."""
MEDIAN_SHARE = 0.5
"""Of max_relative_difference that the median position may have where it is judged."""
TIE_UNITS = 4
"""Tokens whose logits are this many unit roundoffs of the position's largest logit apart count as tied."""


@dataclass(frozen=True)
class LogitFigures:
    """Merged model against base + adapter over all positions of all prompts.

    mean_kl: KL(base + adapter || merged), nats per position. effect_mean_kl: KL(base + adapter || base), what the adapter
    does at all. top1_agreement: share of positions whose most likely token under the merged model is the most likely one
    under base + adapter, or tied with it (TIE_UNITS). median_abs_difference: of the largest difference at each position; None where
    no layer chooses experts.
    """

    num_prompts: int
    num_positions: int
    max_abs_difference: float
    max_abs_logit: float
    mean_kl: float
    effect_mean_kl: float
    top1_agreement: float
    median_abs_difference: float | None = None

    @property
    def relative_difference(self) -> float:
        """Over max_abs_logit, the difference that is judged: of the median position where there is one, else the largest."""
        judged = self.max_abs_difference if self.median_abs_difference is None else self.median_abs_difference
        return judged / self.max_abs_logit if self.max_abs_logit else judged

    @property
    def judged(self) -> str:
        """What relative_difference is."""
        return "largest difference" if self.median_abs_difference is None else "largest difference at the median position"


@dataclass(frozen=True)
class Gate:
    """A merged model passes when all of it holds. Relative difference: that of LogitFigures, or MEDIAN_SHARE of it."""

    max_relative_difference: float
    max_mean_kl: float
    min_top1_agreement: float
    max_kl_share_of_effect: float = 0.1
    """mean_kl over effect_mean_kl, where the effect exceeds max_mean_kl: a copy of the base would have 1."""

    def allowed_difference(self, figures: LogitFigures) -> float:
        """Of the relative difference."""
        return self.max_relative_difference * (1.0 if figures.median_abs_difference is None else MEDIAN_SHARE)


GATES = {
    "bfloat16": Gate(max_relative_difference=32 * UNIT_ROUNDOFF["bfloat16"], max_mean_kl=5e-3, min_top1_agreement=0.97),
    "float16": Gate(max_relative_difference=32 * UNIT_ROUNDOFF["float16"], max_mean_kl=1e-4, min_top1_agreement=0.99),
    # Not 32 u: with so little rounding the order of summation, which kernels choose, is what remains.
    "float32": Gate(max_relative_difference=1e-4, max_mean_kl=1e-7, min_top1_agreement=0.999),
}


def gate_for(base_dtype: str, merged_dtype: str) -> Gate:
    """The gate of the coarser of the two dtypes: base + adapter runs in one, the merged model in the other.

    Raises ValueError for another dtype than bfloat16, float16 or float32.
    """
    for dtype in (base_dtype, merged_dtype):
        if dtype not in GATES:
            raise ValueError(f"dtype {dtype!r}: gates are known for {sorted(GATES)}; pass a Gate of your own.")
    return GATES[max(base_dtype, merged_dtype, key=UNIT_ROUNDOFF.__getitem__)]


def failures(figures: LogitFigures, gate: Gate) -> tuple[str, ...]:
    """One sentence per threshold that is exceeded; NaN exceeds every threshold."""
    found = []
    relative, allowed = figures.relative_difference, gate.allowed_difference(figures)
    if not relative <= allowed:
        found.append(
            f"logits differ by up to {figures.max_abs_difference:.4g}; the {figures.judged} is {relative:.2g} of the largest "
            f"logit, and allowed is {allowed:.2g}"
        )
    if not figures.mean_kl <= gate.max_mean_kl:
        found.append(f"mean KL divergence is {figures.mean_kl:.3g}; allowed is {gate.max_mean_kl:.3g}")
    if not figures.top1_agreement >= gate.min_top1_agreement:
        found.append(f"the most likely token agrees at {figures.top1_agreement:.2%}; required is {gate.min_top1_agreement:.2%}")
    has_effect = figures.effect_mean_kl > gate.max_mean_kl
    if has_effect and not figures.mean_kl <= gate.max_kl_share_of_effect * figures.effect_mean_kl:
        found.append(
            f"the merged model is {figures.mean_kl / figures.effect_mean_kl:.0%} as far from base + adapter as the base "
            f"model is; allowed is {gate.max_kl_share_of_effect:.0%}"
        )
    return tuple(found)
