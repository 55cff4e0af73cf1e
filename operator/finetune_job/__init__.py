"""The definition of a fine-tuning job: spec and status models, defaults, rules, the run plan.

Reading order: `api/job.py` (what a user writes), `rules/book.py` (what is refused and why), `plan/resolve.py` (how a spec
becomes a `RunPlan`), `conditions.py` (what is reported back). The package needs pydantic, but no torch, Kubernetes or kopf.
"""
