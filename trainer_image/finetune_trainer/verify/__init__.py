"""Checks that the merged model is the adapter's model: tensors against fp64, then logits against base + adapter, then a gate.

The entry point is `finetune_trainer.verify.verification.verify_merge`.
"""
