"""The decision table: every documented pitfall once, what the locked libraries do, and what this product does about it.

The entries are data/*.toml, named by their numbers:

    001_027   the very common ones
    028_064   common ones, and those that are severe in current versions
    065_118   launch, precision, quantised bases, ways to start, patterns, methods, tokens, merge
    119_173   checkpointing, packing and chats, other engines, resuming, loading, other tools

`python -m tests.pitfalls.catalogue > docs/reference/pitfalls.md` writes the page.
"""
