"""The RunPlan: spec, profile and defaults resolved once; the only thing that a container reads."""
