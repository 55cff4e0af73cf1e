"""The API server client: kinds, requests, answers, and the fence that blocks requests once the lease is lost."""
