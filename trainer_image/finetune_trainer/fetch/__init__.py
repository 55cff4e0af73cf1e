"""The `fetch` role, which copies models and data from the Hub and object stores to the workspace and verifies each file."""
