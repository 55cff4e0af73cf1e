"""Is the merged model the adapter's model? Tensors against fp64, then logits against base + adapter, then a gate.

The way in is `finetune_trainer.verify.verification.verify_merge`.
"""
