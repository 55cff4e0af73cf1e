"""A disposable Kubernetes cluster for tests: a control plane, and one real node, on this machine."""
