"""`finetune` on a laptop, `kubectl finetune` on a cluster: validate a manifest, explain a rule, run a job, merge adapters.

Reading order: `__main__.py` (the start), `app.py` and `cluster_verbs.py` (the verbs), `checks/` and `commands/` (what each verb
does), `local/` (runs a plan as processes on this machine), `cluster/` (requests to an API server), `jobs/` (conclusions from the
jobs of a cluster), `render/` (how results look). Needs neither torch nor a cluster; `finetune run` starts the trainer as a
program.
"""
