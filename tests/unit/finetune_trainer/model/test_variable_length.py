"""Attention by the bounds of documents against the mask, on models of transformers; and torch's own kernel up to its values.

torch has no such kernel for a CPU: there a document at a time is computed. What the kernel is given, and what shapes and types
come back through forward and backward, torch's own operator says on the meta device.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune_trainer.data.batches import PreparedSplit
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import variable_length
from finetune_trainer.model.activation_checkpointing import is_kept
from finetune_trainer.objective.next_token import NextToken
from finetune_trainer.preflight.attention import measured_problem
from tests.support.tiny_model import prepared_split
from tests.unit.finetune_trainer.train.recorded_steps import distance

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
FALCON = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "mixtral": SIZES | EXPERTS,
    "gpt2": GPT2,
    # A window shorter than the longest documents, of 12 tokens.
    "mistral": SIZES | {"sliding_window": 6},
}


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    sizes = {} if kind == "falcon" else MODELS.get(kind, SIZES)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes))).train()


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of four rows of documents, of which the shorter ones are padded."""
    batch = PreparedSplit.of(prepared_split(4, 1), pad_token_id=256).batch(range(4))
    objective = NextToken()
    objective.install(model)
    loss = objective.weighted_loss(model, batch, 1 / batch.num_supervised_tokens, CPU, None)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return loss.item(), found


def installed_step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    variable_length.install(model)
    return step(model)


def assert_same(found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        assert distance(gradient, wanted[1][name]) <= 1e-6, name


@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_with_a_mask(kind: str) -> None:
    model = model_of(kind)
    masked = step(model)
    with variable_length.installed(model):
        assert_same(step(model), masked)
    assert not variable_length.is_installed(model)
    assert measured_problem(model) == ""


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma2", {}, "caps its attention scores"),
        ("gpt_oss", EXPERTS, "gives attention scores a sink"),
        ("gpt2", {"attn_pdrop": 0.1}, "drops attention scores at random"),
        # Its code makes its own masks.
        ("falcon", FALCON, "does not hand on|makes a mask|has an attention of its own"),
    ],
)
def test_what_the_kernels_do_not_know_is_refused_by_name(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"spec.model.attention: .*({reason})") as raised:
        installed_step(model_of(kind, **changes))
    assert raised.value.hint == "set spec.model.attention: sdpa"
    if kind != "gpt2":
        # Evaluation mode drops nothing; of a model that does in training the configuration tells.
        assert "its code fails with it: ConfigError" in measured_problem(model_of(kind, **changes))


def test_without_the_bounds_no_call_is_answered() -> None:
    model = model_of("llama")
    variable_length.install(model)
    with pytest.raises(ConfigError, match="does not hand on the bounds"):
        model(input_ids=torch.ones(1, 8, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("kind", MODELS)
def test_torchs_operator_takes_what_it_is_given(kind: str) -> None:
    """On the meta device it checks its arguments, and returns the shapes and types of its forward and backward pass."""
    with torch.device("meta"):
        model = model_of(kind).to(torch.bfloat16)
    variable_length.install(model)
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    bounds = variable_length.document_bounds(positions, torch.device("meta"))
    ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
    with _Calls() as calls:
        logits = model(input_ids=ids, position_ids=positions.to("meta"), use_cache=False, **bounds).logits
        logits.float().sum().backward()
    assert (logits.shape, logits.dtype) == ((1, 16, 264), torch.bfloat16)
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "q_proj" in name or "c_attn" in name)
    heads = {"gpt2": 4}.get(kind, 2)
    assert calls.given == [((16, 4, 8), (16, heads, 8), torch.bfloat16, torch.int32, 11, (5 if kind == "mistral" else -1, 0))] * 2


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """What torch's operator was given: shapes of queries and keys, types, the longest document, the window."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "torch_attn::_varlen_attn":
            query, key, _, bounds, _, longest = args[:6]
            assert query.stride(-1) == 1
            self.given.append((tuple(query.shape), tuple(key.shape), query.dtype, bounds.dtype, longest, tuple(args[9])))
            assert is_kept(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("capability", "computed", "problem"),
    [
        ((8, 0), torch.bfloat16, ""),
        ((9, 0), torch.float16, ""),
        ((7, 5), torch.float16, "T4 has compute capability 7.5, and the kernels need 8.0"),
        ((9, 0), torch.float32, "products are torch.float32, and the kernels take only 16 bits"),
    ],
)
def test_what_a_device_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], computed: torch.dtype, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    assert variable_length.device_problem(torch.device("cuda", 0), computed) == problem
    assert variable_length.device_problem(CPU, torch.float32) == ""


def test_bounds_are_those_of_documents_and_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]])
    found = variable_length.document_bounds(positions, CPU)
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 13, 16]
    assert found["cu_seq_lens_k"] is found["cu_seq_lens_q"]
    assert (found["max_length_q"], found["max_length_k"], found["cu_seq_lens_q"].dtype) == (5, 5, torch.int32)


def test_logits_that_differ_from_those_with_a_mask_are_a_reason_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = variable_length.document_bounds
    one_document = lambda positions, device: bounds(torch.arange(positions.numel())[None], device)  # noqa: E731
    monkeypatch.setattr(variable_length, "document_bounds", one_document)
    assert "logits of a small model of this architecture change by" in measured_problem(model_of("llama"))
