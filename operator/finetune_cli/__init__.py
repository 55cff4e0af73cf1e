"""`finetune` on a laptop, `kubectl finetune` on a cluster: validate a manifest, explain a rule, run a job as local processes,
merge adapters.

Reading order: `main.py` (the start), `app.py` (the verbs), `commands/` (what each does, on plain data), `local/` (a plan as
processes), `render/` (how results look). Needs neither torch nor a
cluster; `finetune run` starts the trainer as a program.
"""
