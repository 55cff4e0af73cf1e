"""Ways to start an adapter that change the base in PEFT, need what is not there, or do not exist: `lora-init-not-supported`, the
schema."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from pydantic import ValidationError

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import LoraInit
from finetune_job.plan.resolve import resolve
from finetune_trainer.model.adapters import attach, lora_layers
from finetune_trainer.model.first_values import decompose
from tests.pitfalls.manifests import JOB, findings, manifest, plans
from tests.pitfalls.one_process import llama, tokens

RULE = "lora-init-not-supported"


def adapted(**settings) -> PeftModel:
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **settings))
    assert isinstance(model, PeftModel)
    return model


def base_weight(model: torch.nn.Module) -> torch.Tensor:
    return next(p.detach() for name, p in model.named_parameters() if "layers.0.self_attn.q_proj" in name and "lora" not in name)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_adapter_belongs_to_a_changed_base(init: str):
    assert not torch.equal(base_weight(adapted(init_lora_weights=init)), base_weight(llama()))
    assert torch.equal(base_weight(adapted(init_lora_weights="gaussian")), base_weight(llama()))
    # Here it stays as it is stored.
    assert torch.equal(base_weight(started(init)), base_weight(llama()))
    assert not findings(type="LoRA", lora={"initLoraWeights": init})


def started(init: str, kind: str = "LoRA") -> PeftModel:
    """As the trainer starts it."""
    spec = FineTuneJobSpec.model_validate(manifest(type=kind, lora={"initLoraWeights": init}))
    model = attach(llama(), resolve(JOB, spec, None))
    for layer in lora_layers(model).values():
        rank, scaling = layer.r["default"], layer.scaling["default"]
        a, b = decompose(layer.get_base_layer().weight.detach(), LoraInit(init), rank, scaling, seed=0)
        for name in ("default", "first_values"):
            layer.lora_A[name].weight.data.copy_(a)
            layer.lora_B[name].weight.data.copy_(b)
    return model


def test_pissa_wants_a_base_that_is_not_packed():
    packed = torch.nn.Sequential(Linear4bit(64, 64, bias=False, quant_type="nf4")).to("cpu")
    with pytest.raises(TypeError, match="Please initialize PiSSA under float32, float16, or bfloat16"):
        get_peft_model(packed, LoraConfig(r=4, target_modules=["0"], init_lora_weights="pissa"))
    assert not findings(type="QLoRA", lora={"initLoraWeights": "pissa"})


def test_dora_does_not_start_at_the_base():
    wanted = llama()(input_ids=tokens()).logits
    assert torch.allclose(started("olora")(input_ids=tokens()).logits, wanted, atol=1e-5)
    assert not torch.allclose(started("olora", "DoRA")(input_ids=tokens()).logits, wanted, atol=1e-3)
    assert "decomposed-start-with-dora" in findings(type="DoRA", lora={"initLoraWeights": "olora"})
    starts_right_once_mended("olora", "DoRA", "decomposed-start-with-dora")


def starts_right_once_mended(init: str, kind: str = "LoRA", rule: str = RULE) -> None:
    """The base is the stored one, the adapter changes nothing yet, and every layer's gets a gradient."""
    plan = plans(rule, {"method.type": kind, "method.lora.initLoraWeights": init})[1]
    model = attach(llama(), plan)
    assert torch.equal(base_weight(model), base_weight(llama()))
    found = model(input_ids=tokens(), labels=tokens())
    assert torch.allclose(found.logits, llama()(input_ids=tokens()).logits, atol=1e-6)
    found.loss.backward()
    assert all(value.grad is not None and bool(value.grad.any()) for name, value in model.named_parameters() if "lora_B" in name)


def test_loading_such_an_adapter_changes_the_base_again(tmp_path):
    model = adapted(init_lora_weights="pissa").eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=tokens()).logits, loaded(input_ids=tokens()).logits, atol=1e-3)
    assert not torch.equal(base_weight(loaded), base_weight(llama())), "added to the original weights it would be wrong"


def test_eva_starts_like_any_other_where_nobody_measures():
    state = {name: value for name, value in adapted(init_lora_weights="eva").state_dict().items() if "lora_B" in name}
    assert state
    assert not any(bool(value.any()) for value in state.values())
    starts_right_once_mended("eva")


def test_corda_wants_what_was_measured_before():
    with pytest.raises(ValueError, match="run `preprocess_corda` first"):
        adapted(init_lora_weights="corda")
    starts_right_once_mended("corda")


def test_loftq_quantises_the_base_itself():
    with pytest.raises((ValueError, ImportError, AssertionError)):
        adapted(init_lora_weights="loftq")
    starts_right_once_mended("loftq", "QLoRA")


def test_an_unknown_start():
    with pytest.raises(ValueError, match="Unknown initialization"):
        adapted(init_lora_weights="normal")
    with pytest.raises(ValidationError, match="initLoraWeights"):
        findings(type="LoRA", lora={"initLoraWeights": "normal"})


def test_rslora_scales_by_the_root_of_the_rank():
    plain, rooted = adapted(lora_alpha=8), adapted(lora_alpha=8, use_rslora=True)
    scale = [next(m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)) for model in (plain, rooted)]
    assert scale == [8 / 4, 8 / 2]
    assert "rslora-with-alpha" in findings(type="LoRA", lora={"r": 4, "loraAlpha": 8, "useRslora": True})
    assert "rslora-with-alpha" not in findings(type="LoRA", lora={"r": 4, "loraAlpha": 8})
    # The fix gives the scale that plain LoRA has.
    fixed = plans("rslora-with-alpha", {"method.lora.r": 16, "method.lora.loraAlpha": 32, "method.lora.useRslora": True})[
        1
    ].method.lora
    assert fixed is not None
    assert fixed.lora_alpha / fixed.r**0.5 == 32 / 16
