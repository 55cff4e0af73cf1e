"""Rank 0's share of the judging: what the trainer recorded and wrote, against plain transformers and PEFT."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune_job.api.enumerations import MergeBase
from finetune_job.api.method import LoraInit, MethodType
from finetune_job.api.training import OptimizerName
from finetune_job.methods import METHODS, Family
from finetune_job.plan.run_plan import RunPlan
from finetune_trainer.context import RunContext
from finetune_trainer.files import MANIFEST_FILE
from finetune_trainer.weights.headers import ADAPTER_FILE
from tests.sweep import added, expected, oracle, plain, replay
from tests.sweep.architectures import DTYPES
from tests.sweep.case import SAVED_AT, STEPS, UNSET, Case
from tests.sweep.oracle import Evidence
from tests.sweep.recording import Recorded, whole

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
"""Of logits and of values made in such a type, relative to the largest."""
UPDATE_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5 * 2**-8, torch.float16: 5 * 2**-11}
"""Of weights held in such a type, in which the optimizer's state and its products are rounded, too: up to ten half steps."""
_MANTISSA = {"bfloat16": 8, "float16": 11}
_FACTORS = (1.1, 1.3, 1.7, 1.9)
"""Of a loss whose gradients are to be rounded again, otherwise each time. No power of two, which would change nothing."""
QUIET_STEP = SAVED_AT - 1
"""Of a run with dropout, the step in which it drops nothing: the last one before the checkpoint, so that the resumed run, which
must end on the same bits, draws all its noise."""

STARTING_FROM_BASE = ("pissa", "olora")
"""Starts with a part of the base's weights."""
_SECOND_COPIES = {"original_module", "modules_to_save"}
"""Parts of names in adapter files."""


def training(case: Case, plan: RunPlan, context: RunContext, first: list[Recorded], second: list[Recorded]) -> Evidence:
    """Gradients, updates, resumption and the exported file."""
    evidence = Evidence()
    problems = evidence.problems
    parameters = [whole([notes.parameters[step] for notes in first]) for step in range(STEPS + 1)]
    # The replayed optimizer changes what it starts with.
    started = {name: value.clone() for name, value in parameters[0].items()}
    gradients = [whole([notes.gradients[step] for notes in first]) for step in range(STEPS)]
    resumed = [whole([notes.parameters[step] for notes in second]) for step in range(STEPS + 1 - SAVED_AT)]
    problems += oracle.compare_bits(resumed[0], parameters[SAVED_AT], "weights on resuming")
    problems += oracle.compare_bits(resumed[-1], parameters[-1], "weights at the end of a resumed run")
    held_whole = {name: value for name, value in parameters[0].items() if value.dtype is torch.float32}
    # RAdam begins as plain descent with momentum (Liu and others, 2020, section 4).
    is_descent = plan.training.optimizer in (OptimizerName.SGD, OptimizerName.RADAM)
    problems += oracle.check_moved(held_whole, parameters[1], gradients[0], plan.training.learning_rate if is_descent else None)

    directory = base_by_hand(case, context)
    if case.added:
        problems += added.base_problems(context.base_model, directory, case.added)
    quantized = plan.method.quantization is not None
    base = plain.plain_base(case, directory, quantized=quantized)
    fresh = copy.deepcopy(base) if plan.method.trains_adapter else None
    starts_from_base = case.values.get("init") in STARTING_FROM_BASE
    unpacked = plain.plain_base(case, directory, quantized=False) if quantized and starts_from_base else None
    model = plain.Plain(case, plan, base, unpacked)
    trained = {name: parameter.detach().clone() for name, parameter in model.trained.items()}
    problems += oracle.compare_names(parameters[0], trained, "trained parameters")
    if problems:
        return evidence
    coarse_dtypes = plain.coarse_dtypes(case, plan)
    coarsest = coarse_dtypes[0] if coarse_dtypes else torch.float32
    # Other methods than LoRA's compute what they start from, out of weights that are rounded already.
    first_bound = ROUNDING[coarsest] * (1 if METHODS[plan.method.type].family is Family.LORA else 5)
    first_bound = max(first_bound, ROUNDING[_orthogonal_dtype(plan)])
    problems += oracle.compare_values(parameters[0], trained, first_bound, "first values")

    train = expected.sequences(expected.TRAIN, packs=case.packs, num_added=len(case.added))
    drops = "dropout" in case.values and case.of("dropout") not in (UNSET, "0")
    if drops:
        evidence.not_compared.append(f"gradients: the run draws noise, but in step {QUIET_STEP + 1}")
    compared = (QUIET_STEP,) if drops else range(SAVED_AT)
    for step in compared:
        model.take(parameters[step])
        loss, exact = model.gradients(train, step, torch.float32, is_training=not drops)
        coarse = [model.gradients(train, step, dtype, is_training=not drops) for dtype in coarse_dtypes]
        loss_bound = oracle.FLOAT32_BOUND
        if coarse:
            loss_bound = 5e-3 + oracle.NOISE_FACTOR * max(abs(other - loss) for other, _ in coarse) / abs(loss)
        bits = None if case.of("ranks") == "1" else _MANTISSA.get(str(plan.parallelism.fsdp.reduce_dtype))
        norm = expected.gradient_norm(exact)
        scale = expected.clipping(norm, plan.training.max_grad_norm)
        norm_bound = oracle.norm_bound(exact, [gradients_of for _, gradients_of in coarse], bits, gradients[step])
        problems += oracle.compare_losses(first[0].norms[step], norm, norm_bound, f"gradient norm of step {step + 1}")
        exact = _scaled(exact, scale)
        noisy = [_scaled(gradients_of, scale) for _, gradients_of in coarse]
        redrawn = []
        if any(oracle.has_few(gradient) for gradient in exact.values()):
            redrawn = [
                _scaled(model.gradients(train, step, dtype, not drops, factor)[1], scale)
                for dtype in coarse_dtypes
                for factor in _FACTORS
            ]
        found = oracle.compare_gradients(gradients[step], exact, noisy, bits, redrawn)
        problems += [f"step {step + 1}: {problem}" for problem in found[:3]]
        problems += oracle.compare_losses(first[0].losses[step], loss, loss_bound, f"loss of step {step + 1}")
    if drops:
        problems += _without_gradient(model, train, parameters, gradients, [s for s in range(STEPS) if s not in compared])
    wanted = replay.replayed(model.model, plan, parameters[0], gradients)
    problems += [
        problem
        for name, value in wanted.items()
        for problem in oracle.compare_values(
            parameters[-1], {name: value}, UPDATE_ROUNDING[value.dtype], "weights after the optimizer's steps"
        )
    ]
    best = int(json.loads((context.workspace.adapter / MANIFEST_FILE).read_bytes())["step"])
    model.take(parameters[best])
    if case.of("validation") == "some":
        bound = 2e-2 if coarse_dtypes else 1e-4
        model.take(parameters[-1])
        problems += oracle.compare_losses(
            first[0].held_out[-1],
            model.held_out_loss(expected.sequences(expected.HELD_OUT, packs=case.packs, num_added=len(case.added))),
            bound,
            "held-out loss",
        )
        model.take(parameters[best])
    if fresh is not None:
        problems += _adapter(case, context, model, fresh, started)
    else:
        problems += _whole_model(case, context, model)
    return evidence


def base_by_hand(case: Case, context: RunContext) -> Path:
    """The base that is trained; with added tokens the one that transformers makes, not the trainer's."""
    if not case.added:
        return context.base_model
    path = context.claims_root / "base-by-hand"
    if not path.exists():
        added.write_base(context.source_model, path, case.added)
    return path


def _without_gradient(
    model: plain.Plain,
    split: Sequence[expected.Packed],
    parameters: list[dict[str, torch.Tensor]],
    gradients: list[dict[str, torch.Tensor]],
    steps: list[int],
) -> list[str]:
    """What gets no gradient in any of these noisy steps, although it would without noise. Rows of tokens need their own
    records."""
    wanted: set[str] = set()
    for step in steps:
        model.take(parameters[step])
        _, exact = model.gradients(split, step, torch.float32, is_training=False)
        wanted |= {name for name, gradient in exact.items() if bool(gradient.ne(0).any())}
    still = sorted(
        name for name in wanted if not any(name in gradients[step] and bool(gradients[step][name].ne(0).any()) for step in steps)
    )
    return [f"{len(still)} trained parameters never get a gradient, first {still[0]}"] if still else []


def _scaled(tensors: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in tensors.items()}


def _adapter(case: Case, context: RunContext, model: plain.Plain, fresh: Any, first: dict[str, torch.Tensor]) -> list[str]:
    """The file has what PEFT would have written, and PEFT loads the trained model from it. `first`: what training began with."""
    directory = context.workspace.adapter
    file = load_file(directory / ADAPTER_FILE)
    wanted = get_peft_model_state_dict(model.model, save_embedding_layers=False)
    # With trained biases PEFT writes those of a module that is saved whole twice more, under names that it does not read;
    # that it loads the values is compared below.
    wanted = {name: tensor for name, tensor in wanted.items() if not _SECOND_COPIES & set(name.split("."))}
    held = DTYPES[plain.held_dtype(case)]
    has_plain_form = case.values.get("init") in STARTING_FROM_BASE
    if has_plain_form:
        # [A; A0] and [B, -B0]: what is left of the base, and with it what was taken off, belongs to no file.
        for name, tensor in first.items():
            stored = name.replace(".default.", ".")
            if ".lora_A." in name:
                wanted[stored] = torch.cat([wanted[stored], tensor.float()], 0)
            elif ".lora_B." in name:
                wanted[stored] = torch.cat([wanted[stored], -tensor.float()], 1)
    problems = oracle.compare_names(file, wanted, "adapter file")
    problems += oracle.compare_values(file, wanted, ROUNDING[held], "adapter file")
    if problems:
        return problems
    other = copy.deepcopy(fresh) if case.added else None
    loaded = plain.loaded_adapter(fresh, directory)
    if other is not None:
        # Those who load it add the rows to the published base, and what they hold then is nobody's business.
        added.set_rows(other, case.added, seed=1)
        found = plain.logits(plain.loaded_adapter(other, directory))
        problems += oracle.compare_logits(found, plain.logits(loaded), 0.0, "logits with other rows of added tokens in the base")
    state, expected = loaded.state_dict(), model.model.state_dict()
    exact = {name: tensor for name, tensor in expected.items() if name in model.trained}
    if not has_plain_form:
        problems += oracle.compare_values(state, exact, 0.0, "loaded adapter")
    bound = ROUNDING[held]
    if has_plain_form:
        # One product more adds up in another order, and a packed base rounds what it is given to the type that it computes in.
        bound = max(bound, ROUNDING[DTYPES.get(case.of("compute"), held)])
    wanted_logits = plain.logits(model.model)
    problems += oracle.compare_logits(plain.logits(loaded), wanted_logits, bound, "logits of the loaded adapter")
    if case.added and METHODS[MethodType(case.of("method"))].family is Family.LORA:
        merged = plain.logits(loaded.merge_and_unload())
        problems += oracle.compare_logits(
            merged, wanted_logits, max(bound, 1e-3), "logits of PEFT's merge of rows of added tokens"
        )
    return problems


def _orthogonal_dtype(plan: RunPlan) -> torch.dtype:
    """To which PEFT rounds the values of an orthogonal start: the type of the weight, and a packed one has that of its
    storage."""
    lora, quantization = plan.method.lora, plan.method.quantization
    is_rounded = lora is not None and lora.init_lora_weights is LoraInit.ORTHOGONAL and quantization is not None
    storage = quantization.quant_storage if is_rounded and quantization is not None else None
    return DTYPES[storage.value] if storage is not None and storage.value in DTYPES else torch.float32


def _whole_model(case: Case, context: RunContext, model: plain.Plain) -> list[str]:
    loaded = AutoModelForCausalLM.from_pretrained(context.workspace.adapter, dtype=torch.float32)
    stored = DTYPES[case.values["stored"] if case.of("model_dtype") == UNSET else case.of("model_dtype")]
    wanted = {name: parameter.detach().to(stored).float() for name, parameter in model.model.named_parameters()}
    return oracle.compare_values(dict(loaded.named_parameters()), wanted, 0.0, "written model")


def merged(case: Case, plan: RunPlan, context: RunContext) -> list[str]:
    """The merged model, without PEFT, computes what base and adapter compute; and all that is released knows added tokens."""
    problems: list[str] = []
    if case.added:
        for path in (context.output.adapter, context.output.merged):
            if path.exists():
                problems += added.tokenizer_problems(path, case.added, f"released {path.name}")
        if context.output.merged.exists():
            problems += added.stop_problems(context.output.merged, case.added, "released model")
    return problems + _merged_model(case, plan, context) if plan.merge.enabled else problems


def _merged_model(case: Case, plan: RunPlan, context: RunContext) -> list[str]:
    directory = base_by_hand(case, context)
    if plan.merge.base is MergeBase.DEQUANTIZED:
        # bitsandbytes' layers unpack straight into the type that they compute in.
        compute = DTYPES[plain.held_dtype(case) if case.of("compute") == UNSET else case.of("compute")]
        base = plain.unpacked_base(case, directory, compute)
    else:
        base = plain.stored_base(directory)
    before = plain.logits(base)
    adapted = plain.loaded_adapter(base, context.workspace.adapter)
    wanted = plain.logits(adapted)
    model = AutoModelForCausalLM.from_pretrained(context.output.merged, dtype=torch.float32)
    found = plain.logits(model)
    written = DTYPES[case.values["stored"] if case.of("merge_dtype") == UNSET else case.of("merge_dtype")]
    what = "logits of the merged model"
    problems = oracle.compare_logits(found, wanted, ROUNDING[written], what)
    if problems:
        problems = oracle.compare_logits(found, wanted, ROUNDING[written], what, plain.rounded_logits(adapted, written))
    effect = float((before - wanted).abs().max())
    if METHODS[plan.method.type].family is Family.LORA and effect == 0:
        problems.append("the adapter has no effect")
    if case.added:
        coarsest = max(torch.finfo(dtype).eps for dtype in (written, DTYPES[case.values["stored"]]))
        problems += added.model_problems(model, adapted.merge_and_unload(), coarsest, "merged rows")
    return problems
