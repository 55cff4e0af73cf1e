"""Words that other tools have for values of our fields: the same under another name, or what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from finetune_job.api.inputs import Attention, DataFormat, MappingPreset
from finetune_job.api.method import MethodType
from finetune_job.api.training import ActivationCheckpointing, OptimizerName, Precision, Scheduler

NO_PREFERENCES = (
    "supervised fine-tuning is all there is; train on preferences or rewards with TRL, and merge its adapter with "
    "`finetune merge`"
)


class Meant(NamedTuple):
    """What to write instead of a word."""

    word: str
    why: str
    reason: str = ""
    """What is wrong with the word, if more than that we do not have it."""


OPTIMIZERS = {
    **dict.fromkeys(
        ("adam", "adamw", "adamwtorch", "adamwtorchfused", "adamwhf", "adamwapexfused", "adamwanyprecision"),
        OptimizerName.ADAMW.value,
    ),
    "sgd": OptimizerName.SGD.value,
    "radam": OptimizerName.RADAM.value,
}
SCHEDULERS = {
    "constant": Scheduler.CONSTANT.value, "constantwithwarmup": Scheduler.CONSTANT.value, "linear": Scheduler.LINEAR.value,
    "cosine": Scheduler.COSINE.value, "inversesqrt": Scheduler.INVERSE_SQRT.value,
    "warmupstabledecay": Scheduler.WARMUP_STABLE_DECAY.value, "wsd": Scheduler.WARMUP_STABLE_DECAY.value,
}  # fmt: skip
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
}
PRECISIONS = {**dict.fromkeys(("bf16", "bfloat16", "bf16mixed"), "bf16"), **dict.fromkeys(("no", "fp32", "float32"), "fp32")}
ATTENTIONS = {"sdpa": Attention.SDPA.value, "eager": Attention.EAGER.value}

WORDS: Mapping[str, Mapping[str, str]] = {
    "training.optimizer": OPTIMIZERS,
    "training.scheduler": SCHEDULERS,
    "training.precision": PRECISIONS,
    "model.dtype": DTYPES,
    "parallelism.fsdp.mixedPrecision.paramDtype": DTYPES,
    "parallelism.fsdp.mixedPrecision.reduceDtype": DTYPES,
    "method.quantization.computeDtype": DTYPES,
    "merge.dtype": DTYPES,
    "training.activationCheckpointing": {
        "true": ActivationCheckpointing.FULL.value, "false": ActivationCheckpointing.NONE.value,
        "no": ActivationCheckpointing.NONE.value, "yes": ActivationCheckpointing.FULL.value,
    },
    "data.format": {
        **dict.fromkeys(("messages", "openai", "chatml", "conversation", "conversational"), DataFormat.CHAT.value),
        **dict.fromkeys(("pretrain", "pretraining", "rawtext"), DataFormat.TEXT.value),
    },
}  # fmt: skip
"""Words of others for values of our fields, by path under `spec`; each means the same as ours."""
WORD_ANSWERS: Mapping[str, Mapping[str, Meant]] = {
    "model.attention": {
        **dict.fromkeys(
            ("flashattention2", "flashattention3", "flashattention", "flash", "xformers", "flexattention"),
            Meant(
                Attention.VARLEN.value,
                "torch has such kernels itself; left out, preflight chooses them on a GPU if the model allows it",
            ),
        )
    },
    "training.optimizer": dict.fromkeys(
        ("adamw8bit", "adamwbnb8bit", "pagedadamw8bit", "pagedadamw32bit", "pagedadamw", "lion8bit", "pagedlion8bit"),
        Meant(
            OptimizerName.ADAMW.value,
            "8-bit and paged optimizers are not offered; the ranks share the state of AdamW instead",
        ),
    )
    | dict.fromkeys(
        ("adafactor", "lion", "muon", "galore", "lamb", "sophia", "adagrad", "rmsprop", "schedulefreeadamw"),
        Meant(OptimizerName.ADAMW.value, "AdamW, RAdam and SGD are offered, and the ranks share the state of AdamW"),
    ),
    "training.precision": dict.fromkeys(
        ("fp16", "float16", "16", "16mixed", "half"),
        Meant(Precision.BF16.value, "it needs no loss scaling, and float16 is not offered"),
    )
    | {"fp8": Meant(Precision.BF16.value, "products in FP8 are not offered")},
    "method.type": dict.fromkeys(
        ("dpo", "orpo", "kto", "grpo", "ppo", "rloo", "simpo", "ipo", "cpo", "rlhf", "rl", "reward", "rewardmodel", "rm"),
        Meant(
            MethodType.LORA.value,
            NO_PREFERENCES,
            reason="trains on preferences or rewards, which this product does not do",
        ),
    )
    | {"sft": Meant(MethodType.LORA.value, "every method here is supervised fine-tuning")},
}
"""Words of others that mean something else: what to write instead, and why."""
FORM_PRESETS: Mapping[str, tuple[str, str]] = {
    "alpaca": (DataFormat.PROMPT_COMPLETION.value, MappingPreset.ALPACA.value),
    "sharegpt": (DataFormat.CHAT.value, MappingPreset.SHARE_GPT.value),
}
"""Forms of records that are a format here and a preset of `data.mapping`."""
