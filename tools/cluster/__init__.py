"""A disposable Kubernetes cluster on this machine, for tests and demonstrations: a control plane and, optionally, real nodes."""
