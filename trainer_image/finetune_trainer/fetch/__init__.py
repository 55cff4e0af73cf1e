"""The `fetch` role: models and data from the Hub and from object stores, copied to the workspace, verified file by file."""
