"""Names of modules that need special treatment: embeddings, output heads, routers."""

from collections.abc import Iterable

TOKEN_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "tokens_embed"})
"""Common names of token embeddings in causal language models; preflight also finds embeddings with other names."""
EMBEDDINGS = TOKEN_EMBEDDINGS | {"wpe", "shared"}
"""Common names of all embeddings, including position embeddings and those shared by encoder and decoder."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
"""Common names of output heads, the most common first."""
ROUTERS = frozenset({"gate", "router"})
"""Names of routers, which score the experts for each token: the name of the linear layer itself or of a module around it."""

ADAPTER = "default"
"""PEFT's default adapter name, which the trained adapter has. It is part of the names of the adapter's modules."""


def is_router(name: str) -> bool:
    """Whether a module or a parameter belongs to a router. name: its path in the model."""
    return not ROUTERS.isdisjoint(name.split("."))


def names_embedding(names: Iterable[str]) -> str | None:
    """Return the first name that is a token embedding; None if there is none. names: suffixes of module paths."""
    return next((name for name in names if name.rpartition(".")[2] in TOKEN_EMBEDDINGS), None)


def is_embedding(name: str) -> bool:
    """Whether a module is an embedding, judged by a common name or one that contains "embed". name: its path in the model."""
    last = name.rpartition(".")[2]
    return last in EMBEDDINGS or ("embed" in last and last not in OUTPUT_HEADS)
