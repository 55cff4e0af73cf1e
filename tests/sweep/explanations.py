"""What refusals claim: which of them say that a run fails, and how; and which are refusals on principle.

The judge compares a claim with what was observed. A refusal on principle is never judged to be false, whatever happens: what is
wrong shows in no run, or in none that the sweep can compare. Each has its reason here, or in the reproduction of its rule, which
tells what goes wrong in silence. That it does is shown elsewhere, on the real libraries: tests/unit/sweep/test_policy.py demands
of each such refusal a test that does, or its own word that there is none.
"""

POLICY: dict[str, str] = {
    "wrap-class-list-empty": "trains, but shards nothing: one unit holds the whole model",
    "wrap-class-name-blank": "trains, but shards nothing: one unit holds the whole model",
    "all-linear-beside-names": "trains, but only the names are adapted: the word matches no module",
    "module-adapted-and-saved": "trains, but the module is trained whole and gets no adapter",
    "method-not-supported": "the table of methods says of each why",
    "lora-init-not-supported": "trains, but from other values than the manifest names, or the file is an adapter of another base",
    "lora-plus-ratio-range": "trains, but B, which starts at zero, learns slower than A",
    "global-batch-not-divisible": "trains, but on another global batch than the manifest says",
    "merge-into-quantized": "the merge has no such base; PEFT's own rounds the update away",
    "merge-dequantized-without-qlora": "adds errors that the adapter has never seen",
    "merge-while-sharded": "the merge has no such base",
    "local-state-dict": "our checkpoints have a form of their own, so the setting would be ignored",
    "fsdp1-adapter-16-bit": "trains, but small updates vanish",
    "target-parameter-unknown": "trains, but a parameter that the manifest names is not adapted",
    "saved-module-unknown": "trains, but a module that the manifest names is not trained",
    "added-token-known": "the token is another one than the manifest says: it has an id and a row that the base has learnt",
    "best-model-without-validation": "the setting would be ignored",
    "adapter-pattern-unmatched": "trains, but a rank that the manifest names is used nowhere",
    "full-name-beside-layers": "trains, but a layer that the manifest does not choose is adapted",
    "adapter-patterns-overlap": "trains, but with one of two ranks that the manifest names",
    "target-module-excluded": "trains, but a module that the manifest names is not adapted",
    "experts-not-excluded": "trains, but experts that the manifest excludes are adapted",
    "target-module-not-adapted": "trains, but a module that the manifest names is not adapted",
    "target-module-saved-whole": "trains, but a module that the manifest names gets no adapter",
    "layer-number-unknown": "trains, but a layer that the manifest names does not exist",
    "no-effect-method-setting": "the setting would be ignored",
    "saved-module-inside-adapter": "trains, but an adapted layer is trained whole as well",
    "trainable-token-repeated": "two rows for one token, of which either may be the one that counts",
    "target-parameters-all-layers": "trains, but in other layers than the manifest says",
    "dora-16-bit-magnitude": "trains, but the magnitudes never change",
    "module-adapted-and-excluded": "trains, but a module that the manifest names is not adapted",
    "early-stopping-without-evaluation": "the setting would be ignored",
    "wrap-class-unknown": "trains, but the layers that the manifest means are not sharded",
    "wrap-class-name-malformed": "trains, but the layers that the manifest means are not sharded",
    "target-module-unknown": "trains, but a module that the manifest names is not adapted",
    "adapter-bypassed": "trains, but an adapter that the manifest asks for has no effect; AdamW then has states of different "
    "steps",
    "saved-module-packed": "trains, but the module that the manifest names never changes; AdamW then has states of different "
    "steps",
    "trained-without-gradient": "trains, but what the manifest names learns nothing; AdamW then has states of different steps",
}
"""Id -> what happens in silence where such settings are let through."""

POLICY_MESSAGES: dict[str, str] = {
    "model-settings-conflict": r"small updates vanish in 16 bits",
    "fsdp1-trainable-tokens": r"uniform|several element|trained and frozen|requires_grad|IndexError|size",
    "fsdp1-target-parameters": r"is a view|inplace|in-place|No `target_modules`",
    "target-parameters-conflict": r"ParamWrapper|does not work|No `target_modules`|decomposes the weights",
    "adapter-pattern-on-experts": r"size mismatch|logits of the loaded adapter",
    "token-index-unknown": r"out of bounds|out of range",
    "trainable-tokens-overlap": r"TypeError|trainable_token|PEFT refuses|uniform original|IndexError",
    "trained-in-two-types": r"uniform original parameter dtype|uniform dtype|several element",
    "saved-module-16-bit": r"did not move|not finite|NonFinite",
    "adapter-without-values": r"fails in",
    "method-setting-invalid": r"fails in build",
    "method-settings-conflict": r"fails in build",
    "quantization-bits": r"has no such form",
    # Trains, but by a mask, or without attention at all: what the manifest asks for is not used.
    "attention-not-supported": r"by the bounds of documents: transformers has no fused attention",
}
"""Findings that are refusals on principle where their message says so; a regular expression."""

SEEN: dict[str, str] = {
    "added-tokens-untrained": r"rows of added tokens",
}
"""Id -> what a run says of it. Goes wrong in silence, but the sweep looks for it, so that a refusal of what is right is false."""

ABOUT_ADDED_ROWS = frozenset({"added-tokens-untrained", "added-tokens-without-rows"})
"""Refusals that are wrong where PEFT can train the rows of added tokens."""

GROWS = (
    r"^fsdp1-",
    r"^qlora-storage-not-param-dtype",
    r"^offload-without-gpu",
    r"^model-settings-conflict: .*(cannot shard|version 1 would)",
)
"""Refusals, as `id: message`, of what fails from two ranks on, where one rank works: nothing is sharded there, and rules about
FSDP are applied all the same, so that a job which was tried on one rank can grow (docs/reference/rules.md)."""

UNSEEN: dict[str, str] = {
    "packing-with-recurrent-layers": "the state of one record changes losses and gradients of the next (on the sweep's Mamba "
    "by a quarter of their norm), which are compared with nothing where a run draws noise",
}
"""Id -> why what is silently wrong may not be seen. A refusal on principle of what seems to work; what fails is to be explained
all the same."""

CLAIMS: dict[str, str] = {
    # PEFT 0.21 leaves out the bias of a head of which it trains rows, and its merge does not.
    "added-tokens-without-rows": r"rows of added tokens|merge verification FAILED",
    "target-modules-empty": r"No `target_modules`",
    "decomposed-start-with-dora": r"gradient|loss|norm|logits",
    "lora-dropout-range": r"dropout|zero|did not move|never get a gradient",
    "layers-without-targets": r"layers_to_transform",
    "fsdp1-adapter-dtype": r"uniform dtype|several element types",
    "fsdp1-qlora-compute-dtype": r"uniform dtype|several element types",
    "fsdp1-lora-mixed-requires-grad": r"requires_grad|trained and frozen",
    "fsdp1-trained-bias": r"requires_grad|trained and frozen",
    "fsdp1-dora-orig-params": r"IndexError|tuple index|out of range",
    "fsdp1-qlora-integer-storage": r"integer dtype|Only Tensors of floating point",
    "fsdp1-qlora-storage-not-model-dtype": r"uniform dtype|several element types",
    "qlora-storage-not-param-dtype": r"size|shape|dtype|gradient|loss",
    "fsdp1-trainable-tokens": r"uniform|several element|trained and frozen|requires_grad|IndexError|size",
    "fsdp1-target-parameters": r"is a view|inplace|in-place|No `target_modules`",
    "target-parameters-conflict": r"ParamWrapper|does not work|No `target_modules`|decomposes the weights",
    "adapter-pattern-on-experts": r"size mismatch|logits of the loaded adapter",
    "token-index-unknown": r"out of bounds|out of range",
    "trainable-tokens-overlap": r"TypeError|trainable_token|PEFT refuses|uniform original|IndexError",
    "trained-in-two-types": r"uniform original parameter dtype|uniform dtype|several element",
    "saved-module-16-bit": r"did not move|not finite|NonFinite",
    "adapter-without-values": r"fails in",
    "method-setting-invalid": r"fails in build",
    "method-settings-conflict": r"fails in build",
    "quantization-bits": r"integer dtype|'CB'|bits",
    "fsdp1-adapter-unit": r"requires_grad|trained and frozen",
    "fsdp1-flat-parameter-mixed": r"decay or learn differently",
    "offload-without-gpu": r"pin|accelerator|NVIDIA|driver",
    "model-settings-conflict": r"fails in build|uniform|several element|trained and frozen",
    "model-not-accepted": r"fails in build",
    "merge-impossible": r"in merge",
    "packed-weight-read": r"Expected size|shapes? |dimension|same dtype, but got: signed char",
    # Without original parameters a shard is seen as one dimension; with them, as a view of what was gathered in place since.
    "unit-bypassed": r"DTensor|shape|size|dimension|is a view|inplace",
    "packing-with-recurrent-layers": r"gradient|loss",
    "dora-zero-row": r"row of zeros",
    "stacked-experts-under-fsdp1": r"is a view|inplace",
    "trained-in-float16": r"nan|NonFinite|weights after the optimizer",
}
"""Id -> what an observation must say for this refusal to explain it; a regular expression on `Observation.text()`."""
