"""The text part of a model of images and text is trained, and the merged model is the whole model, of its own class."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import AutoConfig

from finetune_trainer.merge.merge_adapter import MergeOptions, merge_adapter
from tests.support.cases import table
from tests.unit.finetune_trainer.merge import moe, tiny

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = table(__file__, "CONFIGS")  # fmt: skip
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
