"""Names of modules that are treated differently from other matrices: embeddings, output heads, routers."""

from collections.abc import Iterable

TOKEN_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "tokens_embed"})
"""Usual names of input embeddings in causal language models; preflight finds embeddings with other names."""
EMBEDDINGS = TOKEN_EMBEDDINGS | {"wpe", "shared"}
"""Names of all embeddings, including those of positions and those that an encoder and a decoder share."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
"""Names of output heads, the usual name first."""
ROUTERS = frozenset({"gate", "router"})
"""Names of routers, which score the experts for a token: a linear layer of that name, or one within a module of that name."""

ADAPTER = "default"
"""PEFT's default name of an adapter, here the trained one. It is a part of the names of the adapter's modules."""


def is_router(name: str) -> bool:
    """Whether a module or a parameter belongs to a router. name: its path in the model."""
    return not ROUTERS.isdisjoint(name.split("."))


def names_embedding(names: Iterable[str]) -> str | None:
    """Return the first of `names`, which are ends of modules' paths, that is an input embedding."""
    return next((name for name in names if name.rpartition(".")[2] in TOKEN_EMBEDDINGS), None)


def is_embedding(name: str) -> bool:
    """Whether a module's name, a usual one or one with "embed", shows that it is an embedding. name: its path in the model."""
    last = name.rpartition(".")[2]
    return last in EMBEDDINGS or ("embed" in last and last not in OUTPUT_HEADS)
