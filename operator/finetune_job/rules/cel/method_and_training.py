"""Conditions on the method and its settings, on training and on parallelism."""

from __future__ import annotations

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.methods import METHODS, PACKING, Family
from finetune_job.rules.book import RULES
from finetune_job.rules.cel.condition import CelCondition, cel_list, cel_methods, range_conditions
from finetune_job.rules.method_configuration import lora
from finetune_job.sharding import LEAF_CLASSES, SHARDED_BITS

_NOT_SUPPORTED = cel_list([str(kind) for kind, method in METHODS.items() if method.refused])
_KINDS_OF_LORA = [str(kind) for kind, method in METHODS.items() if method.family is Family.LORA]
_MAGNITUDES = cel_list([str(kind) for kind, method in METHODS.items() if method.needs.magnitudes])
_FSDP = "parallelism.fsdp"
_RANKS = "self.parallelism.nodes * self.parallelism.processesPerNode"
_WRAP_POLICY, _CLASSES = f"self.{_FSDP}.autoWrapPolicy", f"self.{_FSDP}.transformerLayerClsToWrap"
_MAY_SEPARATE_ADAPTERS = (
    f"(has({_WRAP_POLICY}) && {_WRAP_POLICY} == '{AutoWrapPolicy.SIZE_BASED_WRAP}') "
    f"|| (has({_CLASSES}) && {_CLASSES}.exists(one, one in {cel_list(list(LEAF_CLASSES))}))"
)
"""`sharding.may_separate_adapters` as CEL. Unlike that function, it accepts class names even if the wrap policy ignores them."""


def _lora(rule: str, name: str, holds: str, says: str) -> CelCondition:
    """Return a condition on a setting of `method.lora`, for methods that use this part of the manifest."""
    field = f"self.lora.{name}"
    guard = f"!has(self.lora) || !(self.type in {cel_methods(Family.LORA)}) || !has({field})"
    return CelCondition(rule, "method", f"{guard} || {holds.replace('SETTING', field)}", says, f"lora.{name}")


def _module_names(name: str) -> CelCondition:
    return _lora(
        "module-name-malformed",
        name,
        "SETTING.all(one, !one.matches('^$|[ \\t\\n\\r,]'))",
        f"{name} holds one module name per item, without blanks and commas",
    )


METHOD_CONDITIONS: tuple[CelCondition, ...] = (
    CelCondition(
        "method-not-supported",
        "method",
        f"!(self.type in {_NOT_SUPPORTED})",
        "this method is not supported; `finetune explain method-not-supported` lists those that are",
        "type",
    ),
    CelCondition(
        "lora-settings-misplaced",
        "method",
        f"!has(self.lora) || self.type in {cel_methods(Family.LORA)}",
        f"only {', '.join(_KINDS_OF_LORA)} take lora; other methods take settings",
        "lora",
    ),
    CelCondition(
        "method-settings-misplaced",
        "method",
        f"!has(self.settings) || !(self.type in {cel_methods(Family.LORA, Family.FULL)})",
        f"this method takes no settings; {', '.join(_KINDS_OF_LORA)} take lora",
        "settings",
    ),
    CelCondition(
        "quantization-without-qlora",
        "method",
        f"!has(self.quantization) || self.type in {cel_list(PACKING)}",
        f"only {' and '.join(PACKING)} have a quantised base; remove quantization, or set type to one of them",
        "quantization",
    ),
    _lora(
        "lora-init-not-supported",
        "initLoraWeights",
        f"!(SETTING in {cel_list([str(init) for init in lora.REFUSED_INITS])})",
        "this way to start an adapter is not supported; remove initLoraWeights",
    ),
    _lora(
        "orthogonal-odd-rank",
        "initLoraWeights",
        "SETTING != 'orthogonal' || self.lora.r % 2 == 0 || has(self.lora.rankPattern)",
        "an orthogonal start needs an even rank",
    ),
    _lora(
        "all-linear-beside-names",
        "targetModules",
        "SETTING.size() == 1 || !('all-linear' in SETTING)",
        "all-linear only has a meaning on its own",
    ),
    _lora(
        "target-modules-empty",
        "targetModules",
        "SETTING.size() > 0 || has(self.lora.targetParameters)",
        "an empty targetModules needs targetParameters",
    ),
    _lora(
        "layers-without-targets",
        "layersToTransform",
        "has(self.lora.targetParameters) || (has(self.lora.targetModules) && self.lora.targetModules != ['all-linear'])",
        "layersToTransform needs names in targetModules",
    ),
    _module_names("targetModules"),
    _module_names("modulesToSave"),
    *(
        _lora(rule.id, name, rule.range.within.cel("SETTING"), f"{name} {rule.range.says}")
        for rule in RULES
        if rule.topic == "method_configuration" and rule.range is not None
        for name in (path.rpartition(".")[2] for path in rule.paths)
    ),
)


RUN_CONDITIONS: tuple[CelCondition, ...] = (
    CelCondition(
        "epochs-or-max-steps", "training", "has(self.epochs) != has(self.maxSteps)", "set exactly one of epochs and maxSteps"
    ),
    *range_conditions("optimizer"),
    CelCondition(
        "compile-with-selective-checkpointing",
        "training",
        "!self.compile || !has(self.activationCheckpointing) || self.activationCheckpointing != 'Selective'",
        "Selective cannot see into a compiled layer; set activationCheckpointing to None or Full, or set compile to false",
        "activationCheckpointing",
    ),
    CelCondition(
        "wrap-class-list-empty",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) || self.transformerLayerClsToWrap.size() > 0",
        "an empty list wraps no layer; leave transformerLayerClsToWrap out, or name the classes",
        "transformerLayerClsToWrap",
    ),
    CelCondition(
        "wrap-class-name-blank",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) || self.transformerLayerClsToWrap.all(one, one.trim() != '')",
        "a blank name matches no class; leave transformerLayerClsToWrap out, or name the classes",
        "transformerLayerClsToWrap",
    ),
    CelCondition(
        "wrap-class-name-malformed",
        _FSDP,
        "!has(self.transformerLayerClsToWrap) "
        "|| self.transformerLayerClsToWrap.all(one, one.trim() == '' || !one.matches('[ \\t,.]'))",
        "transformerLayerClsToWrap holds one class name per item, without blanks, commas and dots",
        "transformerLayerClsToWrap",
    ),
    CelCondition(
        "local-state-dict",
        _FSDP,
        "!has(self.stateDictType) || self.stateDictType != 'LOCAL_STATE_DICT'",
        "a local state dict cannot be read back; remove stateDictType",
        "stateDictType",
    ),
    CelCondition(
        "fsdp1-lora-mixed-requires-grad",
        "",
        f"self.parallelism.fsdp.version != 1 || !(self.method.type in {cel_methods(Family.LORA)}) "
        "|| !has(self.parallelism.fsdp.useOrigParams) || self.parallelism.fsdp.useOrigParams "
        "|| !has(self.parallelism.fsdp.peftWrapPolicy) || self.parallelism.fsdp.peftWrapPolicy "
        f"|| {_MAY_SEPARATE_ADAPTERS}",
        "one flat parameter cannot hold frozen and trained values; set peftWrapPolicy or useOrigParams to true, or version to 2",
        "parallelism.fsdp.peftWrapPolicy",
    ),
    CelCondition(
        "global-batch-not-divisible",
        "",
        "!has(self.training.globalBatchSize) "
        f"|| self.training.globalBatchSize % ({_RANKS} * (has(self.training.microBatchSize) ? self.training.microBatchSize : 1)) "
        "== 0",
        "globalBatchSize must be a multiple of nodes x processesPerNode x microBatchSize",
        "training.globalBatchSize",
    ),
    CelCondition(
        "elastic-min-nodes-above-nodes",
        "parallelism",
        "!has(self.elastic) || self.elastic.minNodes <= self.nodes",
        "minNodes cannot be above parallelism.nodes, the most nodes of the gang; lower minNodes, or raise nodes",
        "elastic.minNodes",
    ),
    CelCondition(
        "elastic-needs-ordered-reduction",
        "",
        "!has(self.parallelism.elastic) || self.training.reduction == 'Ordered'",
        "a different number of ranks would change the result; set training.reduction to Ordered, or remove parallelism.elastic",
        "parallelism.elastic",
    ),
    CelCondition(
        "nodes-need-read-write-many",
        "",
        "self.parallelism.nodes == 1 || !has(self.workspace.volumeClaimTemplate) "
        "|| self.workspace.volumeClaimTemplate.accessMode == 'ReadWriteMany'",
        "several nodes share one workspace; set accessMode to ReadWriteMany",
        "workspace.volumeClaimTemplate.accessMode",
    ),
    CelCondition(
        "quantization-bits",
        "",
        f"!has(self.method.quantization) || !(self.method.type in {cel_list(PACKING)}) "
        f"|| self.method.quantization.bits == {SHARDED_BITS} || (self.method.quantization.bits == 8 && {_RANKS} == 1 "
        f"&& !(self.method.type in {_MAGNITUDES}))",
        "only a 4-bit base can be sharded or have magnitudes; set bits to 4",
        "method.quantization.bits",
    ),
)
