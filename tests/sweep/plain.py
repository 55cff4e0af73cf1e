"""The same training with transformers and PEFT alone: one process, one document at a time, in float32.

Nothing here is the trainer's but the order of its batches: documents and their labels are those of expected.py.

Where the manifest asks for 4-bit weights the plain model has what these weights stand for, unpacked by bitsandbytes once.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.train.batches import global_batch
from tests.sweep.architectures import DTYPES
from tests.sweep.case import UNSET, Case
from tests.sweep.expected import IGNORED, NUM_KNOWN, Packed
from tests.sweep.peft_settings import peft_config

Tensors = dict[str, torch.Tensor]
ROUNDINGS = 8
"""How often the rounding of a merge is drawn again."""
PROBE = [[7, 1, 97, 5, 33, 200, 14, 90, 5, 61], [255, 0, 3, 3, 42, 17, 120, 9]]
"""Tokens, among them those whose rows may be trained."""


def held_dtype(case: Case) -> str:
    """Element type in which an adapter run holds its base, as the manifest's documentation has it."""
    if case.of("precision") == "fp32":
        return "float32"
    held = case.values["stored"] if case.of("model_dtype") == UNSET else case.of("model_dtype")
    computed = (
        ("bfloat16" if case.of("precision") == "bf16" else held) if case.of("param_dtype") == UNSET else case.of("param_dtype")
    )
    gathers = case.of("ranks") == "2" and case.of("version") != "1"
    return held if gathers or held == "float32" else computed


def coarse_dtypes(case: Case, plan: RunPlan) -> list[torch.dtype]:
    """The 16-bit element types that take part in a step, the one with the fewest bits first."""
    fsdp = plan.parallelism.fsdp
    taking_part = {held_dtype(case), fsdp.param_dtype, case.of("compute"), fsdp.reduce_dtype if case.of("ranks") == "2" else None}
    return [DTYPES[name] for name in ("bfloat16", "float16") if name in taking_part]


def plain_base(case: Case, directory: Path, *, quantized: bool) -> Any:
    """The base in float32, with the values that it has in the element type in which a run holds it."""
    held = DTYPES[case.values["stored"] if case.of("method") == "Full" else held_dtype(case)]
    model = _loaded(case, directory, held, quantized=quantized)
    if quantized:
        _unpack(model, held)
    return model.float()


def unpacked_base(case: Case, directory: Path, dtype: torch.dtype) -> Any:
    """The base as its files have it, in float32, but for what a run packs: that is unpacked, straight into `dtype`."""
    packed = _loaded(case, directory, DTYPES[held_dtype(case)], quantized=True)
    model = stored_base(directory)
    for name, layer in _unpack(packed, dtype).items():
        if layer.bias is not None:
            layer.bias = model.get_submodule(name).bias
        _replace(model, name, layer)
    return model


def _loaded(case: Case, directory: Path, held: torch.dtype, *, quantized: bool) -> Any:
    options: dict[str, Any] = {}
    settings = case.spec()["method"].get("quantization", {})
    if quantized and settings.get("bits", 4) == 8:
        options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    elif quantized:
        options = {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=settings.get("quantType", "nf4"),
                bnb_4bit_use_double_quant=settings.get("doubleQuant", True),
                bnb_4bit_compute_dtype=held,
                bnb_4bit_quant_storage=torch.uint8,
            )
        }
    if quantized:
        options["device_map"] = {"": "cpu"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=held, attn_implementation="eager", **options)


def stored_base(directory: Path) -> Any:
    """The base as its files have it, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


class Plain:
    """A plain model with fresh adapters, as PEFT makes them."""

    def __init__(self, case: Case, plan: RunPlan, base: nn.Module, unpacked: nn.Module | None = None) -> None:
        """`unpacked`: what `base` was packed from, if an adapter starts from the stored weights."""
        self.plan = plan
        self.model: Any = base
        if plan.method.trains_adapter:
            torch.manual_seed(plan.training.seed)
            config = peft_config(case)
            init = getattr(config, "init_lora_weights", None)
            is_turned = any(isinstance(module, Conv1D) for module in base.modules())
            is_tied = init in ("pissa", "olora") and bool(base.config.tie_word_embeddings)
            starts_here = (init == "olora" and is_turned) or unpacked is not None or is_tied
            if starts_here:
                config.init_lora_weights = True
            self.model = get_peft_model(base, config)
            if starts_here:
                _start_from_weights(self.model, init, base if unpacked is None else unpacked)
        self.model.train()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the trained parameters have these values."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(values[name])

    def gradients(
        self, split: Sequence[Packed], step: int, dtype: torch.dtype, is_training: bool = True, factor: float = 1.0
    ) -> tuple[float, Tensors]:
        """Loss and gradients, in float32, of a step's whole batch, computed in `dtype`.

        factor: of the loss, and divided out of the gradients, so that it changes nothing but how they are rounded.
        """
        model = self.model if dtype is torch.float32 else copy.deepcopy(self.model).to(dtype)
        model.train(is_training)
        training = self.plan.training
        numbers = global_batch(step, training.global_batch_size, training.seed, len(split))
        loss = documents_loss(model, [split[number] for number in numbers])
        # Gradients below what float16 holds would vanish; the largest factor with which none overflows.
        for power in range(16, -1, -1) if dtype is torch.float16 else (0,):
            scale = factor * 2.0**power
            model.zero_grad()
            (loss * scale).backward(retain_graph=power > 0)
            found = {
                name: torch.zeros_like(parameter).float() if parameter.grad is None else parameter.grad.float() / scale
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            if all(bool(gradient.isfinite().all()) for gradient in found.values()):
                break
        model.zero_grad()
        return float(loss.detach()), found

    def held_out_loss(self, split: Sequence[Packed]) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = float(documents_loss(self.model, split))
        self.model.train()
        return loss


def _start_from_weights(model: nn.Module, init: Any, source: nn.Module) -> None:
    """PiSSA and OLoRA where PEFT 0.21 has none or another: on weights stored as [inputs, outputs], which its olora_init takes for
    [outputs, inputs], on a tied head, with which it changes the embedding, and from weights that a base was packed from.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            held, rank, scaling = layer.get_base_layer(), layer.r["default"], layer.scaling["default"]
            found = source.get_submodule(name.removeprefix("base_model.model."))
            found = getattr(found, "base_layer", found)
            weight = found.weight.data.T if isinstance(found, Conv1D) else found.weight.data
            if init == "olora":
                columns, rows = torch.linalg.qr(weight)
                up, down = columns[:, :rank], rows[:rank]
            else:
                left, values, right = torch.linalg.svd(weight, full_matrices=False)
                root = torch.sqrt(values[:rank] / scaling)
                up, down = left[:, :rank] * root, root[:, None] * right[:rank]
            layer.lora_A["default"].weight.data = down.contiguous()
            layer.lora_B["default"].weight.data = up.contiguous()
            first = scaling * up @ down
            # A parameter of its own: a tied one is the embedding's, too.
            held.weight = nn.Parameter(held.weight.data - (first.T if isinstance(held, Conv1D) else first), requires_grad=False)


def documents_loss(model: Any, sequences: Sequence[Packed]) -> torch.Tensor:
    """Mean cross-entropy over the supervised tokens of these sequences, every document computed alone."""
    total, count = torch.zeros(()), 0
    for documents in sequences:
        for document in documents:
            tokens, labels = torch.tensor(document.tokens), torch.tensor(document.labels)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            # The token at each place is said by the logits of the place before it.
            total = total + functional.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum")
            count += int((labels[1:] != IGNORED).sum())
    return total / count


def logits(model: Any) -> torch.Tensor:
    """For a few tokens, one after the other, and for those that are added or have rows to spare; float32."""
    model.eval()
    texts = [*PROBE, [*range(NUM_KNOWN, model.config.vocab_size)]]
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in texts])


def rounded_logits(model: PeftModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """As `logits`, each time with every adapted weight off by up to what rounding to this type takes from it."""
    weights = {name: weight for name, weight in model.named_parameters() if ".base_layer." in name}
    exact = {name: weight.detach().clone() for name, weight in weights.items()}
    found = []
    for draw in range(ROUNDINGS):
        random = torch.Generator().manual_seed(draw)
        for name, weight in weights.items():
            errors = (2 * torch.rand(weight.shape, generator=random) - 1) * torch.finfo(dtype).eps / 2
            weight.data.copy_(exact[name] * (1 + errors))
        found.append(logits(model))
    return found


def loaded_adapter(base: nn.Module, directory: Path) -> PeftModel:
    """An adapter as its user would load it."""
    found: PeftModel = PeftModel.from_pretrained(base, directory)
    return found


def _unpack(model: nn.Module, dtype: torch.dtype) -> dict[str, nn.Linear]:
    """The layers in place of the packed ones, by name."""
    found = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.dtype = dtype
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            weight = module.weight.data.float() * scale.view(-1, 1) / 127
        else:
            continue
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
        plain.weight = nn.Parameter(weight.float(), requires_grad=False)
        if module.bias is not None:
            plain.bias = nn.Parameter(module.bias.detach().float(), requires_grad=False)
        _replace(model, name, plain)
        found[name] = plain
    for mark in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method", "hf_quantizer"):
        if hasattr(model, mark):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return found


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
