"""Checks that a merged model computes the same as base + adapter: first by tensors, then by logits and a gate.

The entry point is `finetune_trainer.verify.verification.verify_merge`.
"""
