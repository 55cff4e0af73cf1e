"""What only LoRA and its kind have: dropout, scale, first values."""

from __future__ import annotations

from typing import Any

from finetune_job.api.method import ALL_LINEAR, LoraInit, LoraSpec
from finetune_job.method_settings import effective_settings
from finetune_job.methods import METHODS
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import AT_LEAST_1, BELOW_1, Range, range_rules

_LORA = "method.lora"
_RANKS = f"{_LORA}.rankPattern"
_INIT = f"{_LORA}.initLoraWeights"
_PEFT = "peft 0.21"
REFUSED_INITS = {
    LoraInit.CORDA: "it wants covariances of the layers' inputs, measured on the training data before the first step, which this "
    "trainer does not compute",
    LoraInit.LOFTQ: "it quantises the base itself and replaces its weights, so that the adapter belongs to another base model",
    LoraInit.EVA: "it wants activations of the training data before the first step, which this trainer does not compute",
}
"""Why a way to start is not supported; the others are."""


@rule(
    "orthogonal-odd-rank",
    "An orthogonal start takes pairs of rows",
    reads=(_INIT, f"{_LORA}.r", _RANKS, f"{_LORA}.targetModules", f"{_LORA}.excludeModules", f"{_LORA}.modulesToSave"),
    sources=("peft: peft/tuners/lora/layer.py, LoraLayer.orthogonal_init",),
    reproduction=Reproduction(
        "tests/pitfalls/test_adapters.py::test_an_orthogonal_start_needs_an_even_rank",
        "ValueError: Orthogonal initialization requires the LoRA rank to be even",
    ),
    holds_for="peft >= 0.16",
)
def orthogonal_odd_rank(context: RuleContext) -> Problem | None:
    """Of ranks that some adapter has for certain; which modules patterns and all-linear come to, preflight sees."""
    lora = context.lora
    ranks = lora.rank_pattern or {}
    used = {target: _rank_for(target, lora) for target in _adapted_names(lora)} if ranks else {"": lora.r}
    odd = [rank for rank in used.values() if rank is not None and rank % 2]
    if lora.init_lora_weights is not LoraInit.ORTHOGONAL or not odd:
        return None
    even: dict[str, Any] = {f"{_LORA}.r": lora.r + 1} if lora.r % 2 else {}
    if any(rank % 2 for rank in ranks.values()):
        even[_RANKS] = {key: rank + rank % 2 for key, rank in ranks.items()}
    return Problem(
        field=f"{_LORA}.r" if lora.r in odd else _RANKS,
        value=odd[0],
        message='half of the rows start A and the other half B: "Orthogonal initialization requires the LoRA rank to be even"',
        fix=f"write even ranks, or set {_INIT} to {LoraInit.ZERO_B}",
        changes=even,
    )


def _adapted_names(lora: LoraSpec) -> list[str]:
    """Names of modules that get adapters of their own; none where the model alone tells which do."""
    left_out = {*(lora.exclude_modules or ()), *(lora.modules_to_save or ()), ALL_LINEAR}
    return [name for name in lora.target_modules or () if name.isidentifier() and name not in left_out]


def _rank_for(target: str, lora: LoraSpec) -> int | None:
    """Rank of every module whose name ends in `target`; None where that depends on the rest of the name.

    PEFT takes the first key that matches the end of a module's name (peft/utils/other.py, get_pattern_key).
    """
    for key, rank in (lora.rank_pattern or {}).items():
        if key == target:
            return rank
        if not key.isidentifier():
            return None
    return lora.r


@rule(
    "rslora-with-alpha",
    "rsLoRA scales by the square root of the rank",
    severity="warning",
    reads=(f"{_LORA}.useRslora", f"{_LORA}.loraAlpha", f"{_LORA}.r"),
    sources=("Kalajdzievski 2023, A rank stabilization scaling factor for fine-tuning with LoRA",),
    reproduction=Reproduction(
        "tests/pitfalls/test_initialisation.py::test_rslora_scales_by_the_root_of_the_rank",
        "no error: the scale is sqrt(r) times that of plain LoRA",
    ),
    holds_for="every version of peft",
)
def rslora_with_alpha(context: RuleContext) -> Problem | None:
    lora = context.lora
    if not lora.use_rslora or lora.lora_alpha is None or lora.lora_alpha < lora.r or lora.r < 4:
        return None
    factor = lora.r**0.5
    return Problem(
        field=f"{_LORA}.loraAlpha",
        value=lora.lora_alpha,
        message=f"loraAlpha / sqrt(r) is {lora.lora_alpha / factor:g}: {factor:g} times the scale that plain LoRA would have",
        fix=f"set {_LORA}.loraAlpha to about {round(lora.lora_alpha / factor) or 1} for the scale that plain LoRA has",
        changes={f"{_LORA}.loraAlpha": min(round(lora.lora_alpha / factor) or 1, lora.r - 1)},
    )


@rule(
    "lora-init-not-supported",
    "Some ways to start an adapter need measured data, or replace the base",
    reads=(_INIT,),
    sources=("peft: peft/tuners/lora/layer.py, LoraLayer.corda_init, loftq_init", "peft: LoraConfig"),
    reproduction=Reproduction(
        "tests/pitfalls/test_initialisation.py::test_eva_starts_like_any_other_where_nobody_measures "
        "tests/pitfalls/test_initialisation.py::test_corda_wants_what_was_measured_before "
        "tests/pitfalls/test_initialisation.py::test_loftq_quantises_the_base_itself",
        "of eva no error: nothing is measured; corda raises ValueError, loftq an error of its own",
    ),
    holds_for=_PEFT,
)
def lora_init_not_supported(context: RuleContext) -> Problem | None:
    lora = context.spec.method.lora
    if lora is None or lora.init_lora_weights not in REFUSED_INITS:
        return None
    return Problem(
        field=_INIT,
        value=lora.init_lora_weights,
        message=f"{lora.init_lora_weights} is refused: {REFUSED_INITS[lora.init_lora_weights]}",
        fix=f"remove {_INIT}, or set it to {', '.join(init for init in LoraInit if init not in REFUSED_INITS)}",
        changes={_INIT: None},
    )


@rule(
    "decomposed-start-with-dora",
    "DoRA measures its norms on whole weights",
    reads=(_INIT, "method.type"),
    sources=(
        "peft: peft/tuners/lora/dora.py, DoraLinearLayer.forward (the norm of the base's weight and of one adapter)",
        "peft: LoraModel.subtract_mutated_init",
    ),
    reproduction=Reproduction(
        "tests/pitfalls/test_initialisation.py::test_dora_does_not_start_at_the_base",
        "no error: the norms miss what is taken off the base, and training starts elsewhere than at the base model",
    ),
    holds_for=_PEFT,
)
def decomposed_start_with_dora(context: RuleContext) -> Problem | None:
    lora, kind = context.lora, context.spec.method.type
    if not (lora.init_lora_weights.decomposes_base and METHODS[kind].needs.magnitudes):
        return None
    return Problem(
        field=_INIT,
        value=lora.init_lora_weights,
        message=f"{lora.init_lora_weights} starts an adapter with a part of the weight, which a second, frozen adapter takes off "
        f"again; {kind} would divide by norms that know the first alone",
        fix=f"remove {_INIT}, or set method.type to LoRA",
        changes={_INIT: None},
    )


RANGES = (
    Range(
        "lora-dropout-range",
        "Dropout must leave something over",
        (f"{_LORA}.loraDropout",),
        BELOW_1,
        "dropout is a probability below 1; at 1 the adapter sees zeros and learns nothing, above 1 torch refuses it",
        'a number such as "0.05"',
        ("torch: nn.Dropout; a probability of 1 zeroes the adapter's input",),
        "every version",
        Reproduction(
            "tests/pitfalls/test_adapters.py::test_dropout_of_1_blocks_and_above_1_is_refused",
            "ValueError: dropout probability has to be between 0 and 1; at 1 no error: no adapter gets a gradient",
        ),
    ),
    Range(
        "lora-plus-ratio-range",
        "LoRA+ lets B learn faster than A",
        (f"{_LORA}.loraPlusRatio",),
        AT_LEAST_1,
        "it is the learning rate of lora_B as a multiple of lora_A's; below 1, B, which starts at zero, would learn slower",
        'a ratio such as "16"',
        ("Hayou, Ghosh and Yu 2024, LoRA+: efficient low rank adaptation of large models",),
        "every version",
        Reproduction(
            "tests/pitfalls/test_optimizer_settings.py::test_lora_b_learns_slower_below_a_ratio_of_1",
            "no error: the loss is higher after the same steps than without it",
        ),
    ),
)


@rule(
    "dropout-unusual",
    "Dropout leaves most of an adapter's input",
    severity="warning",
    reads=(f"{_LORA}.loraDropout", "method.settings", "method.type"),
    sources=("QLoRA's repository, artidoro/qlora: scripts/finetune_guanaco_7b.sh (lora_dropout 0.1)",),
    holds_for=OURS,
    needs_human=True,
    not_reproduced="it still trains, on a noisier input",
)
def dropout_unusual(context: RuleContext) -> Problem | None:
    method = context.spec.method
    settings = effective_settings(method.type, method.settings or {}) if not context.wrong_settings else {}
    dropouts = {f"method.settings.{name}": value for name, value in settings.items() if name.endswith("Dropout")}
    if method.lora is not None and method.lora.lora_dropout is not None:
        dropouts[f"{_LORA}.loraDropout"] = float(method.lora.lora_dropout)
    path = next((path for path, value in dropouts.items() if isinstance(value, float) and 0.5 <= value < 1), None)
    if path is None:
        return None
    return Problem(
        field="method.settings" if path.startswith("method.settings") else path,
        value=f"{dropouts[path]:g}",
        message="in each step half of what the adapter reads, or more, is replaced by zeros",
        fix=f'write a usual dropout, from "0" to "0.1", or remove {path}',
        changes={path: None},
    )


RULES = (
    *range_rules(__name__, RANGES),
    orthogonal_odd_rank,
    rslora_with_alpha,
    lora_init_not_supported,
    decomposed_start_with_dora,
    dropout_unusual,
)
