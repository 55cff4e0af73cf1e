"""Merge an adapter into its base model: bounded memory, the bits PEFT computes, an output that appears whole or not at all.

headers (what the files hold) -> adapter_settings, assignment, plan (pure: what every output tensor is) -> pieces, steps, stream
(bytes) -> shard_file, journal, writer (files). The way in is `finetune_trainer.merge.run.merge_adapter`.
"""
