"""Loads a transformers model from its directory. Reads only safetensors, fetches nothing, runs remote code only if allowed."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import find_tied_parameters, retie_parameters, set_module_tensor_to_device
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

from finetune_job.api.inputs import Attention
from finetune_job.plan.method_plan import QuantizationPlan
from finetune_job.plan.run_plan import ATTENTION_FIELD, RunPlan
from finetune_trainer.errors import ModelError
from finetune_trainer.model.dtypes import ModelDtypes, resolve_dtypes, torch_dtype
from finetune_trainer.model.packed_weights import make_fit_for_training
from finetune_trainer.weights.errors import MergeError
from finetune_trainer.weights.families import TIE_FIELD, family_of
from finetune_trainer.weights.headers import CONFIG_FILE, read_checkpoint, read_json
from finetune_trainer.weights.read_model import differing_ties
from finetune_trainer.weights.stored import StoredModel

SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_config(plan: RunPlan, directory: Path) -> PreTrainedConfig:
    """The configuration of the model as transformers loads it. Raises ModelError."""
    config = stated_config(plan, directory)
    if _has_two_heads(config, directory):
        # PEFT, and code that builds the model without its files, see only the configuration, so the head is untied there as well.
        _untie(config)
    return config


def stated_config(plan: RunPlan, directory: Path) -> PreTrainedConfig:
    """Return the configuration that config.json states. Raises ModelError."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"spec.model.source: {directory}/config.json does not exist",
            "give the directory of a transformers model, which holds config.json and *.safetensors",
        )
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=plan.model.allow_remote_code, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ModelError(f"spec.model.source: {directory}/config.json is not accepted: {error}") from error


def ties_head(config: PreTrainedConfig) -> bool:
    """Whether a configuration ties the output head to the embeddings."""
    return any(getattr(part, TIE_FIELD, False) for part in (config, config.get_text_config()))


def _untie(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False


def _has_two_heads(config: PreTrainedConfig, directory: Path) -> bool:
    """Whether config.json ties the output head although the files hold other values for it, which transformers then uses."""
    text = config.get_text_config()
    if not ties_head(config):
        return False
    try:
        tensors = read_checkpoint(directory).tensors
        # Looking up an unknown type of model in the library is slow, so this is done only if there may be a second head.
        if (
            sum(
                header.shape[:1] == (getattr(text, "vocab_size", None),) and len(header.shape) == 2 for header in tensors.values()
            )
            < 2
        ):
            return False
        stored = read_json(directory / CONFIG_FILE)
        model = StoredModel(tensors, stored, family_of(stored, tensors))
        return not model.family.always_tied and bool(differing_ties(model))
    except (MergeError, OSError):  # the code that reads the files reports what is wrong
        return False


def attention_of(plan: RunPlan, config: PreTrainedConfig) -> str:
    """Return the attention to request from transformers: the plan's, or eager if we chose the plan's and the model lacks it.

    For varlen, this is the attention that varlen will replace; variable_length.py installs varlen in the trained model.
    """
    asked = plan.model.attention
    is_our_choice = asked is Attention.VARLEN or any(choice.field == ATTENTION_FIELD for choice in plan.choices)
    asked = Attention.SDPA if asked is Attention.VARLEN else asked
    if not is_our_choice or type(config) not in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - there is no public name
        return asked.value
    mapped = AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
    classes = mapped if isinstance(mapped, list | tuple) else (mapped,)
    has_it = all(kind._supports_sdpa for kind in classes)  # noqa: SLF001
    return (asked if has_it else Attention.EAGER).value


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the element type that most of the stored bytes have, according to the safetensors headers. Raises ModelError."""
    try:
        tensors = read_checkpoint(directory).tensors.values()
    except (MergeError, OSError) as error:
        raise ModelError(
            f"spec.model.source: {error}", "give the whole model as safetensors files; pickled ones are refused"
        ) from error
    values: dict[str, int] = {}
    for tensor in tensors:
        values[tensor.dtype] = values.get(tensor.dtype, 0) + tensor.num_bytes
    known = {name: size for name, size in values.items() if name in SAFETENSORS_DTYPES}
    if not known:
        raise ModelError(
            f"spec.model.source: weights in {directory} have element types {sorted(values)}",
            f"give a model stored as one of {sorted(SAFETENSORS_DTYPES)}",
        )
    return SAFETENSORS_DTYPES[max(known, key=lambda name: known[name])]


def build_on_meta(plan: RunPlan, directory: Path) -> PreTrainedModel:
    """Build the model's structure without its weights, with every tensor on torch's meta device."""
    config = load_config(plan, directory)
    dtype = resolve_dtypes(plan, stored_dtype(directory)).load
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(plan, config), trust_remote_code=plan.model.allow_remote_code
        )
    return model


def build_with_lazy_zeros(plan: RunPlan, directory: Path) -> PreTrainedModel:
    """Build the model's structure on the CPU. Its buffers are computed; its parameters are zeros that take no memory."""
    config = load_config(plan, directory)
    dtype = resolve_dtypes(plan, stored_dtype(directory)).load
    with without_values(allow_remote_code=plan.model.allow_remote_code):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(plan, config), trust_remote_code=plan.model.allow_remote_code
        )
    reserve_parameters(model)
    return model


@contextmanager
def without_values(*, allow_remote_code: bool) -> Iterator[None]:
    """Change how models are built in the body: parameters go to the meta device, uninitialised, but buffers are computed.

    Random initial values are not needed and would take half of the time. The library's models compute buffers in their
    constructors; remote code might compute them where it initialises parameters, so its initialisation still runs.
    """
    with init_empty_weights(include_buffers=False), nullcontext() if allow_remote_code else no_init_weights():
        yield


def reserve_parameters(model: PreTrainedModel) -> None:
    """Replace a model's parameters on the meta device with zeros on the CPU, which take no memory until they are written."""
    # While the model was built, each move to the meta device made a separate parameter, so weights are tied again.
    model.tie_weights()
    tied = find_tied_parameters(model)
    for name, parameter in list(model.named_parameters()):
        set_module_tensor_to_device(model, name, "cpu", value=lazy_zeros(parameter.shape, parameter.dtype))
    retie_parameters(model, tied)


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written. They get new pages, because an allocator may reuse memory.

    The pages are private, because a shared page takes memory as soon as it is read.
    """
    count = math.prod(shape)
    pages = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(*shape)


def load_base_model(plan: RunPlan, directory: Path, device: torch.device) -> PreTrainedModel:
    """Load the model with its weights in training mode; quantise it if the plan says so.

    The model is on the CPU until it is sharded, but a quantised model is on `device`, which quantises it. Training mode is set
    here, because `from_pretrained` sets evaluation mode. Raises ModelError.
    """
    config = load_config(plan, directory)
    dtypes = resolve_dtypes(plan, stored_dtype(directory))
    options: dict[str, Any] = {}
    if plan.method.quantization is not None:
        options["quantization_config"] = quantization_config(plan.method.quantization, dtypes.load, packed_dtype(plan, dtypes))
        options["device_map"] = {"": device}
    try:
        model: PreTrainedModel
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            # load_config decides for all loaders whether two heads are the same. transformers would compare converted values, and
            # so would tie heads that differ only in element type.
            config=config,
            dtype=dtypes.load,
            attn_implementation=attention_of(plan, config),
            trust_remote_code=plan.model.allow_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"spec.model.source: the model in {directory} cannot be loaded: {error}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            raise ModelError(
                f"spec.model.source: files in {directory} do not fill the model: {problem} {sorted(map(str, info[problem]))[:3]}",
                "copy all files of the model; a missing weight would be initialised at random",
            )
    if plan.method.quantization is not None:
        make_fit_for_training(model, device)
    if not plan.method.trains_adapter:
        freeze_as_built(model, build_on_meta(plan, directory))
    model.config.use_cache = False
    model.train()
    return model


def freeze_as_built(model: nn.Module, built: nn.Module) -> None:
    """Freeze what the architecture's own code freezes, such as a router's correction bias: transformers makes it trainable again.

    `built`: a model of the same architecture as its constructor returns it.
    """
    frozen = frozen_names(built)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def packed_dtype(plan: RunPlan, dtypes: ModelDtypes) -> torch.dtype:
    """Return the element type in which packed 4-bit weights are stored. The default is a type that no cast converts.

    FSDP 1 flattens these weights with others of their unit; FSDP 2 casts everything it gathers to the computation's type.
    """
    quantization, fsdp = plan.method.quantization, plan.parallelism.fsdp
    if quantization is not None and quantization.quant_storage is not None:
        stored: torch.dtype = getattr(torch, quantization.quant_storage.value)
        return stored
    return (dtypes.param if fsdp.version == 2 else None) or dtypes.load


def quantization_config(quantization: QuantizationPlan, model_dtype: torch.dtype, storage: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' settings for bitsandbytes. `storage`: element type in which packed weights are stored."""
    if quantization.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.quant_type.value,
        bnb_4bit_use_double_quant=quantization.double_quant,
        bnb_4bit_compute_dtype=torch_dtype(quantization.compute_dtype) if quantization.compute_dtype else model_dtype,
        bnb_4bit_quant_storage=storage,
    )


def empty_on_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without values on the meta device."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def pack_layers(
    model: PreTrainedModel,
    quantization: QuantizationPlan,
    storage: torch.dtype,
    made: Callable[[Sequence[int], torch.dtype], torch.Tensor] = empty_on_meta,
) -> None:
    """Replace the layers that transformers would quantise with 4-bit or 8-bit layers, whose weights have the packed shape.

    `made`: creates the tensors of packed weights, whose values are filled in later.
    """
    import bitsandbytes

    settings = quantization_config(quantization, model.dtype, storage)
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    biases = {name: module.bias for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    quantizer.postprocess_model(model)
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            dtype = settings.bnb_4bit_quant_storage
            values_per_element = 2 * dtype.itemsize
            packed = made((-(-module.weight.numel() // values_per_element), 1), dtype)
            module.weight = _packed_parameter(module.weight, packed)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            # PEFT and FSDP need only the element type; the library's parameter class would start to quantise.
            module.weight = nn.Parameter(made(module.weight.shape, torch.int8), requires_grad=False)
        else:
            continue
        if biases.get(name) is not None:
            module.bias = biases[name]


def _packed_parameter(unpacked: nn.Parameter, packed: torch.Tensor) -> nn.Parameter:
    settings = {
        key: getattr(unpacked, key) for key in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
    }
    kind: Any = type(unpacked)
    result: nn.Parameter = kind(packed, requires_grad=False, bnb_quantized=True, **settings)
    return result
