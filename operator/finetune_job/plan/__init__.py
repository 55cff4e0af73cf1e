"""The RunPlan: the spec, the profile and the defaults, resolved once. Containers read nothing else."""
