"""The commonest mistakes in a manifest, each with what is to be answered: written by hand."""

from __future__ import annotations

from typing import Any

NO_COMMIT = "0" * 40
T, D, M, L, F = "spec.training.", "spec.data.", "spec.model.", "spec.method.lora.", "spec.parallelism.fsdp."
CERTAIN, PROPOSED = True, False
MISTAKES: list[tuple[str, Any, bool, str, dict[str, Any]]] = [
    # Misspelt, mis-cased, or in another place
    ("spec.checkpont", {"everySteps": 5}, CERTAIN, "write checkpoint", {"spec.checkpoint": {"everySteps": 5}}),
    (T + "max_grad_norm", "1.0", CERTAIN, "write maxGradNorm", {T + "maxGradNorm": "1.0"}),
    (T + "learnigRate", "2e-4", CERTAIN, "write learningRate", {T + "learningRate": "2e-4"}),
    (L + "lora_alpha", 32, CERTAIN, "write loraAlpha", {L + "loraAlpha": 32}),
    ("spec.method.lora_alpha", 32, CERTAIN, "write spec.method.lora.loraAlpha", {L + "loraAlpha": 32}),
    (T + "maxSequenceLength", 4096, CERTAIN, "write spec.data.maxSequenceLength", {D + "maxSequenceLength": 4096}),
    ("spec.method.type", "lora", CERTAIN, "write LoRA", {"spec.method.type": "LoRA"}),
    ("spec.method.type", "QLora", CERTAIN, "write QLoRA", {"spec.method.type": "QLoRA"}),
    (T + "scheduler", "cosine", CERTAIN, "write Cosine", {T + "scheduler": "Cosine"}),
    (D + "format", "text", CERTAIN, "write Text", {D + "format": "Text"}),
    (F + "autoWrapPolicy", "Transformer_Based_Wrap", CERTAIN, "write TRANSFORMER_BASED_WRAP",
     {F + "autoWrapPolicy": "TRANSFORMER_BASED_WRAP"}),
    (D + "format", "jsonl", PROPOSED, "write 'Chat', 'PromptCompletion' or 'Text'", {D + "format": None}),
    ("metadata.lables", {"team": "a"}, CERTAIN, "write labels", {"metadata.labels": {"team": "a"}}),
    ("metadata.name", "My_Job", CERTAIN, "write my-job", {"metadata.name": "my-job"}),
    # Quotes, types
    (T + "learningRate", 0.0002, CERTAIN, 'write "0.0002" in quotes', {T + "learningRate": "0.0002"}),
    (T + "learning_rate", 0.0002, CERTAIN, 'write learningRate, as learningRate: "0.0002"', {T + "learningRate": "0.0002"}),
    (T + "maxSteps", "12", CERTAIN, "write 12, a whole number without quotes", {T + "maxSteps": 12}),
    (T + "maxSteps", 1e3, CERTAIN, "write 1000, a whole number without quotes", {T + "maxSteps": 1000}),
    (D + "packing", "yes", CERTAIN, "write true, without quotes", {D + "packing": True}),
    (L + "targetModules", "q_proj,v_proj", CERTAIN, "write [q_proj, v_proj]", {L + "targetModules": ["q_proj", "v_proj"]}),
    ("spec.method", "dora", CERTAIN, 'write a mapping of fields to values: {type: dora}, as type: "DoRA"',
     {"spec.method.type": "DoRA"}),
    ("spec.model", "pvc://models/base", CERTAIN, "write a mapping of fields to values: {source: pvc://models/base}",
     {"spec.model": {"source": "pvc://models/base"}}),
    (T + "activationCheckpointing", True, CERTAIN, "write Full", {T + "activationCheckpointing": "Full"}),
    ("spec.training", {"epochs": 0.5}, PROPOSED, "write 1, a whole number without quotes", {T + "epochs": 1}),
    (T + "mixed_precision", "fp8", CERTAIN, "write spec.training.precision: bf16 and spec.training.fp8: true",
     {T + "precision": "bf16", T + "fp8": True}),
    (T + "precision", "fp8", PROPOSED, "write bf16: products in FP8 are a switch of their own, spec.training.fp8: true",
     {T + "precision": "bf16"}),
    # Numbers out of range
    (L + "r", 0, PROPOSED, "write 16 (Rank of the update)", {L + "r": 16}),
    (T + "globalBatchSize", 0, PROPOSED, "write 16 (Sequences per optimizer step, over all ranks)", {T + "globalBatchSize": 16}),
    ("spec.checkpoint.keep", 1, PROPOSED, ("write 2 (Complete checkpoints kept; never fewer than two, because the newest may be "
     "the one that was damaged)"), {"spec.checkpoint.keep": 2}),
    (T + "learningRate", "-1", PROPOSED, ('write a number such as "0.05" or "2e-4", or remove spec.training.learningRate (Peak '
     'learning rate. Unset: "2e-4" for adapters, "2e-5" for Full)'), {T + "learningRate": None}),
    # Units
    ("spec.workspace", {"volumeClaimTemplate": {"storage": "200GB"}}, CERTAIN, "write 200Gi",
     {"spec.workspace.volumeClaimTemplate.storage": "200Gi"}),
    ("spec.workspace", {"volumeClaimTemplate": {"storage": "1.5Ti"}}, CERTAIN, "write 1536Gi",
     {"spec.workspace.volumeClaimTemplate.storage": "1536Gi"}),
    ("spec.workspace", {"volumeClaimTemplate": {"storage": 200}}, PROPOSED, 'put the value in quotes: "200", as storage: "200Gi"',
     {"spec.workspace.volumeClaimTemplate.storage": "200Gi"}),
    ("spec.merge", {"maxShardSize": "5 gb"}, CERTAIN, "write 5GB", {"spec.merge.maxShardSize": "5GB"}),
    # Addresses
    (M + "source", "org/name", PROPOSED, "write hf://org/name, and a revision: the commit that the repository's page shows",
     {M + "source": "hf://org/name", M + "revision": NO_COMMIT}),
    (M + "source", "https://huggingface.co/org/name/tree/main", PROPOSED,
     "write hf://org/name, and a revision: the commit that the repository's page shows",
     {M + "source": "hf://org/name", M + "revision": NO_COMMIT}),
    (D + "source", "/data/x.jsonl", PROPOSED, "write pvc://data/x.jsonl, and give `finetune run` --claim data=/data",
     {D + "source": "pvc://data/x.jsonl"}),
    (D + "source", "org/set", PROPOSED,
     "write hf://datasets/org/set, and a revision: the commit that the repository's page shows",
     {D + "source": "hf://datasets/org/set", D + "revision": NO_COMMIT}),
    (D + "source", "gs://bucket/train.jsonl", PROPOSED, "write pvc://data/train.jsonl, and copy it to the claim data first",
     {D + "source": "pvc://data/train.jsonl"}),
    ("spec.output.destination", "./outputs/run1", PROPOSED,
     "write pvc://outputs/run1, and give `finetune run` --claim outputs=./outputs",
     {"spec.output.destination": "pvc://outputs/run1"}),
    (M[:-1], {"source": "hf://org/name", "revision": "main"}, PROPOSED,
     f'write "{NO_COMMIT}", and put the commit in its place', {M + "revision": NO_COMMIT}),
    # Other tools' names and words
    (T + "gradientAccumulationSteps", 4, PROPOSED,
     ("write spec.training.globalBatchSize: 8 (microBatchSize unset, taken as 1 x 2 "
     "ranks x 4 accumulated): accumulation follows from it"), {T + "globalBatchSize": 8}),
    (T + "perDeviceTrainBatchSize", 2, CERTAIN, "write spec.training.microBatchSize", {T + "microBatchSize": 2}),
    (T + "reportTo", "wandb", CERTAIN, "write spec.training.trackers: [wandb]", {T + "trackers": ["wandb"]}),
    (T + "deepspeed", "zero3.json", PROPOSED, ("remove it: FSDP shards parameters, gradients and optimizer state here, as ZeRO 3 "
     "does; spec.parallelism.fsdp has its settings"), {T + "deepspeed": None}),
    (M + "attention", "flash_attention_2", PROPOSED,
     "write varlen: torch has such kernels itself; left out, preflight chooses them on a GPU if the model allows it",
     {M + "attention": "varlen"}),
    (T + "optim", "adamw_torch", CERTAIN, "write spec.training.optimizer: AdamW", {T + "optimizer": "AdamW"}),
    (T + "optimizer", "adamw_8bit", PROPOSED,
     ("write AdamW: 8-bit and paged optimizers are not offered; the ranks share the state of "
     "AdamW instead"), {T + "optimizer": "AdamW"}),
    (T + "precision", "fp16", PROPOSED, "write bf16: it needs no loss scaling, and float16 is not offered",
     {T + "precision": "bf16"}),
    (T + "bf16", True, CERTAIN, "write spec.training.precision: bf16", {T + "precision": "bf16"}),
    (M + "dtype", "bf16", CERTAIN, "write bfloat16", {M + "dtype": "bfloat16"}),
    (T + "gradient_checkpointing", True, CERTAIN, "write spec.training.activationCheckpointing: Full",
     {T + "activationCheckpointing": "Full"}),
    (D + "max_seq_length", 4096, CERTAIN, "write spec.data.maxSequenceLength", {D + "maxSequenceLength": 4096}),
    (T + "save_steps", 50, CERTAIN, "write spec.checkpoint.everySteps", {"spec.checkpoint.everySteps": 50}),
    (T + "warmup_steps", 1, PROPOSED, 'write spec.training.warmupRatio: "0.1", a share of all steps', {T + "warmupRatio": "0.1"}),
    (T + "warmup_steps", 0.05, CERTAIN, 'write spec.training.warmupRatio: "0.05"', {T + "warmupRatio": "0.05"}),
    (T + "num_warmup_steps", "5e-2", CERTAIN, 'write spec.training.warmupRatio: "0.05"', {T + "warmupRatio": "0.05"}),
    (T + "warmup_steps", 0, CERTAIN, 'write spec.training.warmupRatio: "0"', {T + "warmupRatio": "0"}),
    (T + "save_steps", 0.5, PROPOSED, "write spec.checkpoint.everySteps: 5, a number of steps and no share of them",
     {"spec.checkpoint.everySteps": 5}),
    (T + "eval_steps", 0.001, PROPOSED, "write spec.evaluation.everySteps: 1, a number of steps and no share of them",
     {"spec.evaluation.everySteps": 1}),
    (T + "logging_steps", 1, PROPOSED, "remove it: every step is logged", {T + "logging_steps": None}),
    ("spec.method.load_in_4bit", True, CERTAIN, "write spec.method.type: QLoRA, which packs the base in 4 bits",
     {"spec.method.type": "QLoRA"}),
    (L + "rank", 8, CERTAIN, "write spec.method.lora.r", {L + "r": 8}),
    ("spec.nodeSelector", {"gpu": "a100"}, PROPOSED,
     ("remove it: images, resources and placement are the FineTuneProfile's, which "
     "spec.profile names"), {"spec.nodeSelector": None}),
]  # fmt: skip
"""Path and value as written, whether `--fix` makes the change, the fix in words, and what then is written by path."""
