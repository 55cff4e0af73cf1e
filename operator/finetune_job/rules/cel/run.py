"""Conditions on training and parallelism."""

from __future__ import annotations

from finetune_job.api.parallelism import AutoWrapPolicy
from finetune_job.methods import Family
from finetune_job.rules.cel.condition import Condition, kinds, within, words
from finetune_job.rules.optimizer import moments, schedule
from finetune_job.sharding import LEAF_CLASSES

_FSDP = "parallelism.fsdp"
_RANKS = "self.parallelism.nodes * self.parallelism.processesPerNode"
_WRAP_POLICY, _CLASSES = f"self.{_FSDP}.autoWrapPolicy", f"self.{_FSDP}.transformerLayerClsToWrap"
_MAY_PART_ADAPTERS = (
    f"(has({_WRAP_POLICY}) && {_WRAP_POLICY} == '{AutoWrapPolicy.SIZE_BASED_WRAP}') "
    f"|| (has({_CLASSES}) && {_CLASSES}.exists(one, one in {words(list(LEAF_CLASSES))}))"
)
"""`sharding.may_part_adapters` over the manifest; it lets classes pass that another wrap policy does not look at."""


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "epochs-or-max-steps", "training", "has(self.epochs) != has(self.maxSteps)", "set exactly one of epochs and maxSteps"
    ),
    *within(schedule.RANGES),
    *within(moments.RANGES),
    Condition(
        "compile-with-selective-checkpointing",
        "training",
        "!self.compile || !has(self.activationCheckpointing) || self.activationCheckpointing != 'Selective'",
        "a compiled layer hides its matrix products; set activationCheckpointing to None or Full, or compile to false",
        "activationCheckpointing",
    ),
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
        f"self.parallelism.fsdp.version != 1 || !(self.method.type in {kinds(Family.LORA)}) "
        "|| !has(self.parallelism.fsdp.useOrigParams) || self.parallelism.fsdp.useOrigParams "
        "|| !has(self.parallelism.fsdp.peftWrapPolicy) || self.parallelism.fsdp.peftWrapPolicy "
        f"|| {_MAY_PART_ADAPTERS}",
        "one flat parameter cannot hold frozen and trained values; set peftWrapPolicy or useOrigParams to true, or version to 2",
        "parallelism.fsdp.peftWrapPolicy",
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
        "quantization-bits",
        "",
        "!has(self.method.quantization) || self.method.type != 'QLoRA' || self.method.quantization.bits == 4 "
        f"|| (self.method.quantization.bits == 8 && {_RANKS} == 1)",
        "only a 4-bit base can be sharded; set bits to 4",
        "method.quantization.bits",
    ),
)
