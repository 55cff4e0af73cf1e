"""Of a model of images and text the text part is trained, and the merged model is the whole one again, of its own class."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import AutoConfig

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from tests.unit.finetune_trainer.merge import moe, tiny

TEXT: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 257, "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
TOKENS = {"image_token_id": 262, "video_token_id": 261, "vision_start_token_id": 260, "vision_end_token_id": 259}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "rope_parameters": ROTARY,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Trained by the class of the whole.
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": TEXT, "vision_config": VISION | {"patch_size": 14}, "mm_tokens_per_image": 4, "image_token_index": 262},
    ),
    # Trained by a class of text alone, whose names lack a prefix of the file's.
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": TEXT | {"intermediate_size_mlp": 96, "num_local_experts": 4},
            "vision_config": VISION
            | {"patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {
            "text_config": TEXT | {"cross_attention_layers": [1]},
            "vision_config": {
                **VISION, "attention_heads": 2, "num_global_layers": 1, "vision_output_dim": 64, "max_num_tiles": 2,
                "intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
        },
    ),
    # Whose names lack one from the middle.
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": TEXT | LINEAR_ATTENTION,
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
            },
            **TOKENS,
        },
    ),
}  # fmt: skip
LORA = LoraConfig(r=4, target_modules=["down_proj", "o_proj"], layers_to_transform=[0, 2], task_type="CAUSAL_LM")


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_merged_model_is_the_whole_again(kind: str, tmp_path: Path) -> None:
    name, settings = CONFIGS[kind]
    whole = getattr(transformers, name)
    torch.manual_seed(11)
    base = tmp_path / "base"
    whole(AutoConfig.for_model(kind, **settings)).to(torch.bfloat16).save_pretrained(base, max_shard_size="100KB")
    adapter = tiny.save_adapter(tmp_path / "adapter", base, LORA)

    merge_adapter(MergeOptions(base, (adapter,), tmp_path / "merged", None, 1 << 30))
    before, merged = moe.load_weights(base), moe.load_weights(tmp_path / "merged")
    assert merged.keys() == before.keys()
    changed = {path for path, values in merged.items() if not torch.equal(values, before[path])}
    assert changed
    assert all("layers" in path and path.endswith(("down_proj.weight", "o_proj.weight")) for path in changed)
    assert not any(part in path for path in changed for part in ("vision", "visual", "projector"))

    model, loading = whole.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values())
    expected = tiny.peft_merged(base, adapter)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert trained.keys() == expected.keys()
    assert [path for path, values in trained.items() if not torch.equal(values, expected[path])] == []
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()
