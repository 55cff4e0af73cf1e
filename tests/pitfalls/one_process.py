"""Settings of a method on a tiny model in one process: attached by the trainer's own code, and trained for two steps."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.method import MethodType
from finetune_job.finding import Finding
from finetune_job.method_settings import peft_fields
from finetune_job.rules.book import evaluate
from finetune_job.rules.rule import RuleContext
from finetune_trainer.model.adapters import config_class
from tests.unit.finetune_job.rules.manifests import applied, manifest

VOCABULARY = 64
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
}


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    error: str = ""
    """Type and message of the exception that ended it."""
    trained: int = 0
    """Values that are trained."""
    without_gradient: tuple[str, ...] = ()
    """Trained tensors whose gradient was None or zero in the second step."""
    is_finite: bool = True
    """Whether loss and trained values were finite."""
    adapted: frozenset[str] = frozenset()
    """Last parts of the names of the modules that hold trained values."""
    logits: torch.Tensor | None = None
    """After the two steps, in evaluation mode."""

    @property
    def is_fine(self) -> bool:
        """Whether everything that is trained learns."""
        return not self.error and self.trained > 0 and self.is_finite and not self.without_gradient


def llama(**settings: Any) -> PreTrainedModel:
    """A tiny Llama; the same weights every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **settings}))


def mixtral(**settings: Any) -> PreTrainedModel:
    """A tiny mixture of experts, whose weights are stacked."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}
    return MixtralForCausalLM(MixtralConfig(**{**_SIZES, **experts, "tie_word_embeddings": False, **settings}))


def peft_config(method: str, settings: dict[str, Any]) -> PeftConfig:
    """As the trainer makes it. Raises AssertionError where a name or a type is wrong."""
    values, wrong = peft_fields(MethodType(method), settings)
    assert not wrong, wrong
    return config_class(MethodType(method))(task_type="CAUSAL_LM", **values)


def tokens() -> torch.Tensor:
    """Every token occurs."""
    return torch.arange(VOCABULARY).reshape(2, -1)


def trained(method: str, settings: dict[str, Any], model: PreTrainedModel | None = None, base: str = "llama") -> Outcome:
    """Two steps of Adam with these settings of `method.settings`, which PEFT gets without a question."""
    try:
        return _steps(get_peft_model(model or {"llama": llama, "mixtral": mixtral}[base](), peft_config(method, settings)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return Outcome(error=f"{type(error).__name__}: {error}")


def _steps(model: torch.nn.Module) -> Outcome:
    model.train()
    held = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.Adam(held.values(), lr=1e-2)
    torch.manual_seed(1)
    silent: tuple[str, ...] = ()
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        silent = tuple(name for name, value in held.items() if value.grad is None or not bool(value.grad.any()))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits
    return Outcome(
        trained=sum(value.numel() for value in held.values()),
        without_gradient=silent,
        is_finite=bool(torch.isfinite(loss)) and all(bool(torch.isfinite(value).all()) for value in held.values()),
        adapted=frozenset(_module(name) for name in held),
        logits=logits,
    )


def _module(name: str) -> str:
    parts = name.split(".")
    return next((part for part in reversed(parts) if part.endswith("_proj") or part in ("lm_head", "embed_tokens")), parts[-2])


def judged(changes: dict[str, Any]) -> tuple[Finding, ...]:
    """What the rule book says of the plain job with these changes."""
    return evaluate(RuleContext(FineTuneJobSpec.model_validate(manifest(changes))))


def fixed(changes: dict[str, Any], rule: str) -> dict[str, Any]:
    """The spec after the fix of that rule's finding."""
    finding = next(each for each in judged(changes) if each.rule == rule)
    return applied(manifest(changes), finding.changes)
