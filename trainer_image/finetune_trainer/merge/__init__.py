"""Merges an adapter into its base model in bounded memory, bit-identical to PEFT. The output is either complete or absent.

adapter_settings, resolve_changes and plan determine every output tensor from headers alone. chunks, steps and stream compute
its bytes. shard_file, journal and writer write the files. The entry point is `merge_adapter.merge_adapter`.
"""
