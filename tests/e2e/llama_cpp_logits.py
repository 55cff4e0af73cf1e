"""`python llama_cpp_logits.py MODEL [ADAPTER] < ids.json`: llama.cpp's logits of all positions, as a .npy file.

Runs in the environment of llama_cpp.py, with -P, because that file has the library's name. Keys and values are kept in float32,
as the models to compare with have them.
"""

import io
import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def main(model: str, adapter: str | None = None) -> None:
    ids = json.load(sys.stdin)
    loaded: Any = llama_cpp.Llama(
        model,
        lora_path=adapter,
        n_ctx=2 * len(ids),
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    loaded.eval(ids)
    content = io.BytesIO()
    np.save(content, np.array(loaded.scores[: len(ids)], dtype=np.float32))
    sys.stdout.buffer.write(content.getvalue())


if __name__ == "__main__":
    main(*sys.argv[1:])
