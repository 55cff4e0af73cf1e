"""What the API server refuses at once: conditions over the object alone, as CEL in the schema, under the ids of the rule book.

Every condition is true for each object that its rule lets pass; the rule may refuse more, because it sees the whole plan and the
profile. A number with a fraction is read as a double here and exactly there, so that the conditions leave the last digit alone.
Conditions stay cheap: the API server counts the cost of the longest lists and texts that the schema allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_job.api.base import HUB_DATASETS
from finetune_job.methods import METHODS, Family
from finetune_job.rules.methods import REFUSED_INITS
from finetune_job.rules.rule import UNREADABLE, Rule


@dataclass(frozen=True)
class Condition:
    """A condition that a part of the spec has to meet."""

    rule: str
    """Id in the rule book; `UNREADABLE` where the models' own validators refuse the same."""
    at: str
    """Path under spec of what `self` stands for; empty: the spec itself. Items of a list are `[]`."""
    holds: str
    """CEL, true where all is well."""
    says: str
    field: str = ""
    """Path under `at` of the field that is reported; empty: `at` itself."""

    @property
    def message(self) -> str:
        """What the API server answers."""
        return f"{self.rule}: {self.says}"


def _words(words: list[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in words) + "]"


def _kinds(*families: Family) -> str:
    return _words([str(kind) for kind, method in METHODS.items() if method.family in families])


_FSDP = "parallelism.fsdp"
_NOT_SUPPORTED = _words([str(kind) for kind, method in METHODS.items() if method.refused])
_NOT_MERGED = _words([str(kind) for kind, method in METHODS.items() if method.not_merged and not method.refused])
_ONE_RANK = _words([str(kind) for kind, method in METHODS.items() if method.one_rank and not method.refused])
_RANKS = "self.parallelism.nodes * self.parallelism.processesPerNode"
_HAS_HELD_OUT = "has(self.data.validation)"
_PATHS = ("model.source", "data.source", "data.datasets[].source", "data.validation.source", "output.destination")
_DATA = ("data.datasets[]", "data.validation")
"""Where records are named beside `data` itself, whose source counts only without datasets."""


def _below_one(rule: str, at: str, name: str) -> Condition:
    return Condition(rule, at, f"!has(self.{name}) || {_is_below_one(f'self.{name}')}", f"{name} must be below 1", name)


def _is_below_one(number: str) -> str:
    return f"(double({number}) <= 1.0 && !{number}.matches('^0*1([.]0*)?$'))"


def _at_most_one(rule: str, at: str, name: str) -> Condition:
    return Condition(rule, at, f"!has(self.{name}) || double(self.{name}) <= 1.0", f"{name} must be at most 1", name)


def _lora(rule: str, name: str, holds: str, says: str) -> Condition:
    """A condition on a setting of `method.lora`, which only the methods that take it are judged by."""
    field = f"self.lora.{name}"
    guard = f"!has(self.lora) || !(self.type in {_kinds(Family.LORA)}) || !has({field})"
    return Condition(rule, "method", f"{guard} || {holds.replace('SETTING', field)}", says, f"lora.{name}")


def _module_names(name: str) -> Condition:
    return _lora(
        "module-name-malformed",
        name,
        "SETTING.all(one, !one.matches('^$|[ \\t\\n\\r,]'))",
        f"{name} holds one module name per item, without blanks and commas",
    )


def _revision(at: str, guard: str) -> tuple[Condition, Condition]:
    return (
        Condition(
            "hub-source-without-revision",
            at,
            f"{guard}!self.source.startsWith('hf://') || has(self.revision)",
            "an hf:// source is read at a commit; set revision to its 40 digits",
        ),
        Condition(
            "revision-without-hub-source",
            at,
            f"{guard}self.source.startsWith('hf://') || !has(self.revision)",
            "only an hf:// source has a revision; remove it",
        ),
    )


def _data_is_no_model(at: str, guard: str) -> Condition:
    return Condition(
        "data-source-is-model",
        at,
        f"{guard}!self.source.startsWith('hf://') || self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf:// without {HUB_DATASETS} names a model; write hf://{HUB_DATASETS}<organisation>/<name>",
    )


_ONLY_SOURCE = "has(self.datasets) || !has(self.source) || "

CONDITIONS: tuple[Condition, ...] = (
    # data
    Condition(
        "source-or-datasets",
        "data",
        "has(self.source) != has(self.datasets) && !(has(self.datasets) && has(self.revision))",
        "set exactly one of source and datasets; a revision belongs to its source",
    ),
    Condition(
        "chat-template-without-chat",
        "data",
        "!has(self.chatTemplate) || self.format == 'Chat'",
        "a chatTemplate renders records of format Chat; remove it, or set format to Chat",
        "chatTemplate",
    ),
    Condition(
        "assistant-loss-without-chat",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Assistant' || self.format == 'Chat'",
        "only records of format Chat have turns of an assistant; set lossOn to Completion or All",
        "lossOn",
    ),
    Condition(
        "completion-loss-on-text",
        "data",
        "!has(self.lossOn) || self.lossOn != 'Completion' || self.format != 'Text'",
        "records of format Text have no completion; set lossOn to All",
        "lossOn",
    ),
    Condition(
        "dataset-weight-range",
        "data.datasets[]",
        "double(self.weight) > 0.0 && double(self.weight) <= 100.0",
        "a record occurs more than 0 and at most 100 times in a pass",
        "weight",
    ),
    *_revision("data", _ONLY_SOURCE),
    _data_is_no_model("data", _ONLY_SOURCE),
    *(condition for at in _DATA for condition in (*_revision(at, ""), _data_is_no_model(at, ""))),
    # model
    *_revision("model", ""),
    Condition(
        "model-source-is-dataset",
        "model",
        f"!self.source.startsWith('hf://{HUB_DATASETS}')",
        f"hf://{HUB_DATASETS} names a data set; write hf://<organisation>/<model>",
        "source",
    ),
    Condition(
        "model-source-inside-repository",
        "model",
        f"!self.source.startsWith('hf://') || self.source.startsWith('hf://{HUB_DATASETS}') "
        "|| self.source.matches('^hf://[^/]+/[^/]+/*$')",
        "a model is a whole repository; write hf://<organisation>/<model>",
        "source",
    ),
    # method
    Condition(
        "method-not-supported",
        "method",
        f"!(self.type in {_NOT_SUPPORTED})",
        "this method is not supported; `finetune explain method-not-supported` lists those that are",
        "type",
    ),
    Condition(
        "lora-settings-misplaced",
        "method",
        f"!has(self.lora) || self.type in {_kinds(Family.LORA)}",
        f"only {', '.join(str(kind) for kind, method in METHODS.items() if method.family is Family.LORA)} take lora; "
        "other methods take settings",
        "lora",
    ),
    Condition(
        "method-settings-misplaced",
        "method",
        f"!has(self.settings) || !(self.type in {_kinds(Family.LORA, Family.FULL)})",
        "this method takes no settings; LoRA, QLoRA and DoRA take lora",
        "settings",
    ),
    Condition(
        "quantization-without-qlora",
        "method",
        "!has(self.quantization) || self.type == 'QLoRA'",
        "only QLoRA has a quantised base; remove quantization, or set type to QLoRA",
        "quantization",
    ),
    Condition(
        "quantization-bits",
        "method",
        "!has(self.quantization) || self.type != 'QLoRA' || self.quantization.bits == 4",
        "only a 4-bit base can be sharded; set bits to 4",
        "quantization",
    ),
    _lora(
        "lora-init-not-supported",
        "initLoraWeights",
        f"!(SETTING in {_words([str(init) for init in REFUSED_INITS])})",
        "this way to start an adapter is not supported; remove initLoraWeights",
    ),
    _lora(
        "orthogonal-odd-rank",
        "initLoraWeights",
        "SETTING != 'orthogonal' || self.lora.r % 2 == 0",
        "an orthogonal start needs an even rank",
    ),
    _lora(
        "all-linear-beside-names",
        "targetModules",
        "SETTING.size() == 1 || !('all-linear' in SETTING)",
        "all-linear means something only alone",
    ),
    _lora(
        "layers-without-targets",
        "layersToTransform",
        "has(self.lora.targetParameters) || (has(self.lora.targetModules) && self.lora.targetModules != ['all-linear'])",
        "layersToTransform needs names in targetModules",
    ),
    _module_names("targetModules"),
    _module_names("modulesToSave"),
    _lora("lora-dropout-range", "loraDropout", _is_below_one("SETTING"), "loraDropout must be below 1"),
    _lora("lora-plus-ratio-range", "loraPlusRatio", "double(SETTING) >= 1.0", "loraPlusRatio must be at least 1"),
    # training
    Condition(
        "epochs-or-max-steps", "training", "has(self.epochs) != has(self.maxSteps)", "set exactly one of epochs and maxSteps"
    ),
    _below_one("warmup-ratio-range", "training", "warmupRatio"),
    _at_most_one("decay-ratio-range", "training", "decayRatio"),
    _at_most_one("min-learning-rate-ratio-range", "training", "minLearningRateRatio"),
    _below_one("adam-beta-range", "training", "adamBeta1"),
    _below_one("adam-beta-range", "training", "adamBeta2"),
    _below_one("momentum-range", "training", "momentum"),
    Condition(
        "adam-epsilon-zero",
        "training",
        "!has(self.adamEpsilon) || double(self.adamEpsilon) >= 1.2e-38",
        'adamEpsilon must be a positive number such as "1e-8"',
        "adamEpsilon",
    ),
    Condition(
        "learning-rate-zero",
        "training",
        "!has(self.learningRate) || double(self.learningRate) > 0.0",
        "at a learningRate of 0 no weight would change",
        "learningRate",
    ),
    Condition(
        "compile-with-selective-checkpointing",
        "training",
        "!self.compile || !has(self.activationCheckpointing) || self.activationCheckpointing != 'Selective'",
        "a compiled layer hides its matrix products; set activationCheckpointing to None or Full, or compile to false",
        "activationCheckpointing",
    ),
    # parallelism
    Condition(
        "wrap-class-list-empty",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) || self.transformerLayerClsToWrap.size() > 0",
        "an empty list wraps no layer; leave transformerLayerClsToWrap out, or name the classes",
        "transformerLayerClsToWrap",
    ),
    Condition(
        "wrap-class-name-blank",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) || self.transformerLayerClsToWrap.all(one, one.trim() != '')",
        "a blank name matches no class; leave transformerLayerClsToWrap out, or name the classes",
        "transformerLayerClsToWrap",
    ),
    Condition(
        "wrap-class-name-malformed",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) "
        "|| self.transformerLayerClsToWrap.all(one, one.trim() == '' || !one.matches('[ \\t,.]'))",
        "transformerLayerClsToWrap holds one class name per item, without blanks, commas and dots",
        "transformerLayerClsToWrap",
    ),
    Condition(
        "local-state-dict",
        _FSDP,
        "!has(self.stateDictType) || self.stateDictType != 'LOCAL_STATE_DICT'",
        "a local state dict cannot be read back; remove stateDictType",
        "stateDictType",
    ),
    Condition(
        "fsdp1-lora-mixed-requires-grad",
        "",
        f"self.parallelism.fsdp.version != 1 || !(self.method.type in {_kinds(Family.LORA)}) "
        "|| !has(self.parallelism.fsdp.useOrigParams) || self.parallelism.fsdp.useOrigParams "
        "|| !has(self.parallelism.fsdp.peftWrapPolicy) || self.parallelism.fsdp.peftWrapPolicy",
        "one flat parameter cannot hold frozen and trained values; set peftWrapPolicy or useOrigParams to true, or version to 2",
        "parallelism.fsdp.peftWrapPolicy",
    ),
    Condition(
        "both-activation-checkpointings",
        "",
        "!has(self.parallelism.fsdp.activationCheckpointing) || !self.parallelism.fsdp.activationCheckpointing "
        "|| !has(self.training.activationCheckpointing) || self.training.activationCheckpointing != 'Full'",
        "activations cannot be recomputed twice; remove parallelism.fsdp.activationCheckpointing",
        "parallelism.fsdp.activationCheckpointing",
    ),
    Condition(
        "global-batch-not-divisible",
        "",
        f"self.training.globalBatchSize % ({_RANKS} * (has(self.training.microBatchSize) ? self.training.microBatchSize : 1)) == 0",
        "globalBatchSize must be a multiple of nodes x processesPerNode x microBatchSize",
        "training.globalBatchSize",
    ),
    Condition(
        "nodes-need-read-write-many",
        "",
        "self.parallelism.nodes == 1 || !has(self.workspace.volumeClaimTemplate) "
        "|| self.workspace.volumeClaimTemplate.accessMode == 'ReadWriteMany'",
        "several nodes share one workspace; set accessMode to ReadWriteMany",
        "workspace.volumeClaimTemplate.accessMode",
    ),
    Condition(
        "method-on-one-rank-only",
        "",
        f"!(self.method.type in {_ONE_RANK}) || {_RANKS} == 1",
        "this method trains on one rank only; set nodes and processesPerNode to 1",
        "method.type",
    ),
    # evaluation, merge, output, workspace
    Condition(
        "early-stopping-without-evaluation",
        "",
        f"!has(self.evaluation.earlyStopping) || (has(self.evaluation.everySteps) && {_HAS_HELD_OUT})",
        "early stopping needs evaluation.everySteps and data.validation",
        "evaluation.earlyStopping",
    ),
    Condition(
        "best-model-without-validation",
        "",
        f"!self.evaluation.loadBestModelAtEnd || {_HAS_HELD_OUT}",
        "the best checkpoint is found on held-out records; set data.validation",
        "evaluation.loadBestModelAtEnd",
    ),
    Condition(
        "method-not-mergeable",
        "",
        f"!self.merge.enabled || !(self.method.type in {_NOT_MERGED})",
        "the adapter of this method cannot be merged; set merge.enabled to false",
        "merge.enabled",
    ),
    Condition(
        "merge-into-quantized",
        "merge",
        "!self.enabled || self.base != 'Quantized'",
        "packing the sum again would round most of the update away; set base to Original",
        "base",
    ),
    Condition(
        "merge-while-sharded",
        "merge",
        "!self.enabled || self.base != 'Trained'",
        "a sharded model cannot be merged in place; set base to Original",
        "base",
    ),
    Condition(
        "merge-dequantized-without-qlora",
        "",
        "!self.merge.enabled || self.merge.base != 'Dequantized' || self.method.type == 'QLoRA'",
        "only QLoRA trains on packed weights; set base to Original",
        "merge.base",
    ),
    _at_most_one("verification-agreement-range", "merge.verify", "minTop1Agreement"),
    Condition(
        "output-adapter-is-the-result",
        "",
        "self.output.adapter || self.merge.enabled || self.method.type == 'Full'",
        "nothing is merged, so the adapter is the result; remove output.adapter, or set merge.enabled to true",
        "output.adapter",
    ),
    Condition(
        "workspace-claim-or-template",
        "workspace",
        "has(self.claimName) != has(self.volumeClaimTemplate)",
        "set exactly one of claimName and volumeClaimTemplate",
    ),
    # what the models' validators say in Python
    *(
        Condition(UNREADABLE, path, "!self.matches('/[.][.]?(/|$)')", "it leaves its root; write a path without '.' and '..'")
        for path in _PATHS
    ),
    *(
        Condition(
            UNREADABLE,
            path,
            f"!self.matches('^hf://{HUB_DATASETS}[^/]*/*$')",
            f"it names no data set; write hf://{HUB_DATASETS}<organisation>/<name>",
        )
        for path in _PATHS[:-1]
    ),
    Condition(
        UNREADABLE,
        _PATHS[-1],
        f"!self.startsWith('hf://{HUB_DATASETS}')",
        "it names a data set, and results are a model; write hf://<organisation>/<model>",
    ),
)


def conditions_of(rule: Rule) -> tuple[Condition, ...]:
    """The conditions by which the API server refuses some of what the rule refuses."""
    return tuple(condition for condition in CONDITIONS if condition.rule == rule.id)


@dataclass(frozen=True)
class Transition:
    """A condition over an object and what it was before, which only the API server knows."""

    rule: str
    title: str
    fix: str


FROZEN = Transition(
    "frozen-after-start",
    "The settings of a job that has started are final; only spec.run can change",
    "create a new job for other settings",
)
CANCELLED = Transition("cancel-is-final", "A cancelled job cannot be revived", "create a new job")
TRANSITIONS = (FROZEN, CANCELLED)
