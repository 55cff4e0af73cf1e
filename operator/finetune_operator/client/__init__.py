"""The client of the API server: kinds, requests, answers, and the fence that stops requests once the lease is lost."""
