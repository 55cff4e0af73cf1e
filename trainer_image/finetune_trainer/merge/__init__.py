"""Merges an adapter into its base model: bounded memory, the bits that PEFT computes, an output that is complete or absent.

adapter_settings, resolve_changes, plan (pure, from headers alone: what every output tensor is) -> chunks, steps, stream (bytes)
-> shard_file, journal, writer (files). The entry point is `finetune_trainer.merge.merge_adapter.merge_adapter`.
"""
