"""`finetune` on a laptop, `kubectl finetune` on a cluster: validate a manifest, explain a rule, run a job, merge adapters.

Reading order: `__main__.py` (the start), `app.py` and `cluster_verbs.py` (the verbs), `checks/` and `commands/` (what each verb
does), `local/` (runs a plan as processes on this machine), `cluster/` (requests to an API server), `jobs/` (what a cluster's
jobs reveal), `render/` (how results look). The package needs neither torch nor a cluster: `finetune run` starts the trainer as a
separate process.
"""
