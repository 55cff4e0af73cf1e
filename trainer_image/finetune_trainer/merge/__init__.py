"""Merge an adapter into its base model: bounded memory, the bits PEFT computes, an output that appears whole or not at all.

adapter_settings, resolve_changes, plan (pure, from headers alone: what every output tensor is) -> chunks, steps, stream (bytes)
-> shard_file, journal, writer (files). The way in is `finetune_trainer.merge.merge_adapter.merge_adapter`.
"""
