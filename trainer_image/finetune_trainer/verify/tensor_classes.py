"""What a tensor is in a transformer, by its stored name: for a report that says which kind of weights a merge changed."""

from __future__ import annotations

import re

ORDER = ("attention q", "attention k", "attention v", "attention o", "attention q+k+v", "mlp gate", "mlp up", "mlp down", "experts",
         "router", "embeddings", "output head", "norms", "other")  # fmt: skip
"""In which reports list them."""

_MODULES = {
    "attention q": {"q_proj", "q", "query", "wq", "q_a_proj", "q_b_proj"},
    "attention k": {"k_proj", "k", "key", "wk"},
    "attention v": {"v_proj", "v", "value", "wv"},
    "attention o": {"o_proj", "o", "wo", "out_proj", "dense"},
    "attention q+k+v": {"c_attn", "qkv_proj", "query_key_value", "Wqkv"},
    "mlp gate": {"gate_proj", "wi_0", "w1"},
    "mlp up": {"up_proj", "wi", "wi_1", "c_fc", "w3", "gate_up_proj", "dense_h_to_4h", "fc1"},
    "mlp down": {"down_proj", "w2", "dense_4h_to_h", "fc2"},
    "embeddings": {"embed_tokens", "wte", "wpe", "shared", "word_embeddings", "embed_in", "tok_embeddings", "tokens_embed"},
    "output head": {"lm_head", "embed_out", "output"},
}
_CLASSES = {module: name for name, modules in _MODULES.items() for module in modules}
_ROUTERS = {"gate", "router", "classifier"}
_NORM = re.compile(r"norm|(^|\.)ln_?\w*$", re.IGNORECASE)
_MLP_BLOCK = re.compile(r"(^|\.)(mlp|ff|feed_forward|DenseReluDense)$")


def class_of(name: str) -> str:
    """One of ORDER. Biases and further parameters belong to the class of their module."""
    module = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
    parent, _, last = module.rpartition(".")
    if last in _ROUTERS:
        return "router"
    if ".experts." in f".{module}.":
        return "experts"
    if _NORM.search(last):
        return "norms"
    if last in ("c_proj", "wo") and _MLP_BLOCK.search(parent):
        return "mlp down"
    if last == "c_proj":
        return "attention o"
    return _CLASSES.get(last, "other")
