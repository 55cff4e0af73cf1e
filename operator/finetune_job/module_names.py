"""What models call the modules that are not treated as the other matrices of a layer: embeddings, output heads, routers."""

from collections.abc import Iterable

TOKEN_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "tokens_embed"})
"""Input embeddings of causal language models; what else they may be called, preflight sees."""
EMBEDDINGS = TOKEN_EMBEDDINGS | {"wpe", "shared"}
"""With those of positions, and those that an encoder and a decoder share."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
"""The usual name first."""
ROUTERS = frozenset({"gate", "router"})
"""What scores the experts for a token: a linear layer of that name, or one within a module of that name."""

ADAPTER = "default"
"""What PEFT calls an adapter that nobody names: the one that is trained. Part of the names of its modules."""


def is_router(name: str) -> bool:
    """Whether a module or a parameter belongs to a router. name: its path in the model."""
    return not ROUTERS.isdisjoint(name.split("."))


def names_embedding(names: Iterable[str]) -> str | None:
    """The first of `names`, ends of modules' paths, that is an input embedding."""
    return next((name for name in names if name.rpartition(".")[2] in TOKEN_EMBEDDINGS), None)


def is_embedding(name: str) -> bool:
    """Whether a module is an embedding by its name: one of the usual, or one that says so. name: its path in the model."""
    last = name.rpartition(".")[2]
    return last in EMBEDDINGS or ("embed" in last and last not in OUTPUT_HEADS)
