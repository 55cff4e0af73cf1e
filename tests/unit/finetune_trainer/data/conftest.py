"""Jobs as preflight sees them, for tests of what it looks at."""

from tests.unit.finetune_trainer.preflight.conftest import claims, context, made_claims, manifest, model

__all__ = ["claims", "context", "made_claims", "manifest", "model"]
