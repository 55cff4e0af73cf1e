"""The merged model: what can be merged, its element type, its base and its verification."""

from __future__ import annotations

from decimal import Decimal

from finetune_job.api.enumerations import Dtype, MergeBase
from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import AT_MOST_1, Range, range_rules

_TYPE = "method.type"
_SETTINGS = "method.settings"
_MERGE = "merge.enabled"
_PEFT = "peft 0.21"
_BASE = "merge.base"
_DTYPE = "merge.dtype"
_DIVERGENCE = "merge.verify.maxKlDivergence"
_LEAST_DIVERGENCE = Decimal("1e-17")
"""Right merges into float32, which rounds least, of models of two layers after three steps have 1e-16 to 6e-16."""


@rule(
    "merge-dtype-overflow",
    "float16 holds less than the base does",
    severity="warning",
    reads=(_DTYPE, "model.dtype"),
    sources=("IEEE 754: float16 ends at 65504, bfloat16 and float32 at 3.4e38",),
    reproduction=Reproduction(
        "tests/pitfalls/test_loss_scaling.py::test_large_weights_are_infinite_in_float16",
        "no error: a weight of 70000 is infinite",
    ),
    holds_for="every version",
)
def merge_dtype_overflow(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.method.type is MethodType.FULL or not spec.merge.enabled or spec.merge.dtype is not Dtype.FLOAT16:
        return None
    if spec.model.dtype in (None, Dtype.FLOAT16):
        return None
    return Problem(
        field=_DTYPE,
        value=spec.merge.dtype,
        message=f"weights and, later, activations of a {spec.model.dtype} model can exceed 65504, the largest float16 number",
        fix=f"remove {_DTYPE}: the merged model then has the base's own type",
        changes={_DTYPE: None},
    )


@rule(
    "verification-divergence-zero",
    "Merged weights are rounded",
    reads=(_DIVERGENCE, _MERGE, _TYPE),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_results.py::test_a_rounded_merge_diverges",
        "VerificationError: mean KL divergence of 90% of positions is 1e-16 or more; allowed is 0, or 1e-17",
    ),
    holds_for=OURS,
)
def verification_divergence_zero(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    written = merge.verify.max_kl_divergence
    # Other methods may change what is stored and nothing else, such as a norm, and then lose nothing.
    is_rounded = METHODS[context.spec.method.type].family is Family.LORA
    if written is None or Decimal(written) > _LEAST_DIVERGENCE or not merge.enabled or not is_rounded:
        return None
    return Problem(
        field=_DIVERGENCE,
        value=written,
        message="merging rounds every changed weight, so the divergence is never zero, and 1e-16 or more in every type: the "
        "merged model would be refused once all the training is done",
        fix=f'write a number such as "1e-3", or remove {_DIVERGENCE}',
        changes={_DIVERGENCE: None},
    )


@rule(
    "merge-into-quantized",
    "Merging into packed weights rounds the update away",
    reads=(_BASE, "method.type"),
    sources=("peft: peft/tuners/lora/bnb.py, Linear4bit.merge", "peft: issues 2105 and 2321"),
    reproduction=Reproduction(
        "tests/pitfalls/test_quantization.py::test_merging_into_4_bits_rounds_the_update_away",
        "no error but a warning: logits move by more than the adapter's effect",
    ),
    holds_for="every version of peft; its warning speaks of rounding errors only",
)
def merge_into_quantized(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    if not merge.enabled or merge.base is not MergeBase.QUANTIZED:
        return None
    return Problem(
        field=_BASE,
        value=merge.base,
        message="the sum of packed weight and update is packed again into 4 or 8 bits, which rounds most of the update away, and "
        "the merged model stays quantised",
        fix=f"set {_BASE} to Original: the adapter is added to the 16-bit weights",
        changes={_BASE: MergeBase.ORIGINAL},
    )


@rule(
    "merge-dequantized-without-qlora",
    "Only QLoRA and QDoRA train on packed weights",
    reads=(_BASE, "method.type"),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_results.py::test_nothing_was_packed_that_could_be_unpacked",
        "ValueError, after the training: merged_onto is Dequantized, but no quantization is given",
    ),
    holds_for=OURS,
)
def merge_dequantized_without_qlora(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    kind = context.spec.method.type
    if not merge.enabled or merge.base is not MergeBase.DEQUANTIZED or METHODS[kind].packs_base:
        return None
    return Problem(
        field=_BASE,
        value=merge.base,
        message=f"{kind} trains on the weights as they are stored: nothing was packed that the merge could unpack, and after the "
        "training it would fail",
        fix=f"set {_BASE} to Original",
        changes={_BASE: MergeBase.ORIGINAL},
    )


@rule(
    "merge-while-sharded",
    "A sharded model cannot be merged in place",
    reads=(_BASE, "parallelism.fsdp.version"),
    sources=("peft: docs/source/accelerate/fsdp.md", "peft: issues 2129 and 1674"),
    reproduction=Reproduction(
        "tests/pitfalls/test_merging.py::test_a_sharded_model_cannot_be_merged_under_fsdp_1",
        "RuntimeError: the shard is not a matrix",
    ),
    holds_for="torch >= 2.0, FSDP 1; under FSDP 2 it works on a CPU and was not seen on a GPU",
)
def merge_while_sharded(context: RuleContext) -> Problem | None:
    merge = context.spec.merge
    if not merge.enabled or merge.base is not MergeBase.TRAINED:
        return None
    return Problem(
        field=_BASE,
        value=merge.base,
        message='between two steps a rank holds only flat shards, and merge_and_unload fails on them: "The tensor has a non-zero '
        'number of elements, but its data is not allocated yet"; offloaded or packed weights are on another device than the '
        "adapter, and a GPU would be held for it",
        fix=f"set {_BASE} to Original: a CPU pod merges the saved adapter into the stored weights",
        changes={_BASE: MergeBase.ORIGINAL},
    )


RANGES = (
    Range(
        "verification-agreement-range",
        "Agreement is a share",
        ("merge.verify.minTop1Agreement",),
        AT_MOST_1,
        "the agreement is a share of positions and never exceeds 1, so every merged model would be refused",
        'a share such as "0.95"',
        ("this product's API",),
        OURS,
        Reproduction(
            "tests/pitfalls/test_results.py::test_no_merged_model_agrees_more_than_always",
            "VerificationError: the most likely token agrees at 100.00%; required is 200.00%",
        ),
    ),
)
RULES = (
    merge_dtype_overflow,
    *range_rules(__name__, RANGES),
    verification_divergence_zero,
    merge_into_quantized,
    merge_dequantized_without_qlora,
    merge_while_sharded,
)
