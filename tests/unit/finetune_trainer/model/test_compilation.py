"""Layers that are compiled: once for all of them and for every batch, and to the same losses and gradients."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch._dynamo.utils import counters
from torch._inductor import config
from transformers import AutoConfig, AutoModelForCausalLM
from triton import knobs
from triton.runtime import build

from finetune_job.plan.run_plan import FsdpPlan
from finetune_trainer.errors import ConfigError
from finetune_trainer.model import compilation, variable_length
from finetune_trainer.model.adapters import attach
from finetune_trainer.model.compilation import compile_layers
from finetune_trainer.model.fused_adapters import fuse_adapters
from tests.support.tiny_model import plan_of, tiny_spec

ROOT = Path(__file__).parents[4]
SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4}
"""More layers than torch compiles versions of one function, after which it compiles no more."""
IDS = torch.arange(4 * 24).view(4, 24) * 7 % 264


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that torch does before it calls one: what it traces and how often. Generated code is the library's."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: original(layer, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def adapted() -> tuple[Any, FsdpPlan]:
    torch.manual_seed(1)
    plan = plan_of(tiny_spec(method={"type": "LoRA", "lora": {"r": 4, "loraAlpha": 6}}))
    model = attach(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)), plan)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, plan.parallelism.fsdp


def step(model: Any, ids: torch.Tensor = IDS) -> tuple[float, torch.Tensor]:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return loss.item(), found


def test_all_layers_share_their_code_and_compute_what_peft_computes() -> None:
    model, fsdp = adapted()
    loss, wanted = step(model)
    fuse_adapters(model, ())
    assert compile_layers(model, fsdp) == SIZES["num_hidden_layers"]
    compiled_loss, found = step(model)
    # One for the first, whose input needs no gradient, and one for all others.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-6


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_the_compiler_measures_nothing_if_kernels_are_pinned(is_deterministic: bool) -> None:
    assert not config.deterministic
    model, fsdp = adapted()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        compile_layers(model, fsdp)
        assert config.deterministic is is_deterministic
    finally:
        torch.use_deterministic_algorithms(before)
        config.deterministic = False


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's launcher, compiled as for the image."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc is installed")
    # A path of its own for the programs that the script calls: this Python may have another name.
    place = tmp_path_factory.mktemp("launcher")
    (place / "python3.11").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}
    script = ROOT / "trainer_image/layers/build-launcher.sh"
    nvidia = Path(triton.__file__).parent / "backends/nvidia"
    subprocess.run(["sh", script, nvidia, place / "made"], env=environment, check=True)
    return place / "made"


def test_the_launcher_of_the_image_is_what_triton_would_compile(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "LAUNCHER", launcher)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.build, "impl", None)
    compilation.take_launcher()
    monkeypatch.setenv("PATH", "/nowhere")
    source = Path(triton.__file__).parent / "backends/nvidia/driver.c"
    cached = Path(build.compile_so_from_file(str(source), "cuda_utils", libraries=["libcuda.so.1"]))
    assert cached.is_relative_to(tmp_path)
    assert cached.read_bytes() == next(launcher.iterdir()).read_bytes()
    with pytest.raises(ConfigError, match=r"spec.training.compile: Triton needs other in compiled form"):
        build.compile_so_from_src("int other;", "other")


def test_without_a_compiler_the_image_has_no_launcher_and_says_so(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mkdir").symlink_to(shutil.which("mkdir") or "")
    script = ROOT / "trainer_image/layers/build-launcher.sh"
    done = subprocess.run(
        ["/bin/sh", script, tmp_path / "nvidia", tmp_path / "made"],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "COMPILER_IMAGE has no gcc: jobs of this image cannot set training.compile\n"
    assert list((tmp_path / "made").iterdir()) == []


def test_the_launcher_loads_where_a_driver_is(launcher: Path, tmp_path: Path) -> None:
    """The driver's functions stand in empty: what is shown is that this Python takes the module, and what it offers."""
    (module,) = launcher.iterdir()
    assert os.access(module, os.X_OK)
    listed = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True).stdout
    wanted = sorted({line.split()[-1] for line in listed.splitlines() if line.split()[-1].startswith("cu")})
    assert len(wanted) > 10
    (tmp_path / "driver.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in wanted))
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
    subprocess.run(command, check=True)
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.spec_from_file_location('cuda_utils', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(found)\n"
        "found.loader.exec_module(module)\n"
        "print(module.launch, module.load_binary, module.build_signature_metadata)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, module], env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    alone = subprocess.run([sys.executable, "-c", code, module], env={}, capture_output=True, text=True, check=False)
    assert "libcuda.so.1" in alone.stderr


@pytest.mark.parametrize(
    ("installed", "has_launcher", "needed"),
    [
        ((), False, {"cpu": True, "cuda": True}),
        ((), True, {"cpu": True, "cuda": False}),
        (("clang",), False, {"cpu": True, "cuda": False}),
        (("g++",), False, {"cpu": False, "cuda": True}),
    ],
)
def test_what_is_missing_to_compile(
    installed: tuple[str, ...], has_launcher: bool, needed: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(compilation, "LAUNCHER", tmp_path)
    if has_launcher:
        (tmp_path / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    # Of another Python: Triton would not find it.
    (tmp_path / "cuda_utils.cpython-39-x86_64-linux-gnu.so").touch()
    wanted = {"cpu": ("g++", "c++", "clang++"), "cuda": ("gcc", "cc", "clang")}
    assert {kind: compilation.missing_compiler(kind) for kind in needed} == {
        kind: wanted[kind] if is_missing else () for kind, is_missing in needed.items()
    }


@pytest.mark.parametrize(("has_gcc", "has_launcher", "takes"), [(False, True, True), (True, True, False), (False, False, False)])
def test_a_compiler_that_is_there_is_used(
    has_gcc: bool, has_launcher: bool, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name if has_gcc and name == "gcc" else None)
    monkeypatch.setattr(compilation, "LAUNCHER", tmp_path)
    monkeypatch.setattr(knobs.build, "impl", None)
    if has_launcher:
        (tmp_path / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    model, fsdp = adapted()
    compile_layers(model, fsdp)
    assert (knobs.build.impl is not None) is takes


@torch.library.custom_op("finetune_test::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """One call, as a device's kernel is, of which the compiler knows the shape of the result alone."""
    bounded = {"scale": scale, "window_size": (-1, 0), "enable_gqa": False}
    return variable_length.by_document(query, key, value, bounds, bounds, longest, longest, **bounded)


@attention.register_fake
def _(query: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(query)


def test_other_documents_are_no_reason_to_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: Any, key: Any, value: Any, bounds: Any, _of_keys: Any, longest: int, _longest: int, **others: Any) -> Any:
        return attention(query, key, value, bounds, longest, others["scale"])

    monkeypatch.setattr(variable_length, "_kernel", lambda _device: kernel)
    model, fsdp = adapted()
    variable_length.install(model.get_base_model())
    compile_layers(model, fsdp)
    graphs = []
    for lengths in ([9, 15], [16, 8], [10, 4, 10], [14, 2, 2, 2, 4]):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.no_grad():
            model(
                input_ids=IDS[:1], position_ids=positions, use_cache=False,
                **variable_length.document_bounds(positions, torch.device("cpu")),
            )  # fmt: skip
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1, 1]
    assert not counters["graph_break"]


def test_bounds_are_of_any_number_and_of_few_greatest_lengths() -> None:
    model, fsdp = adapted()
    compile_layers(model, fsdp)
    seen: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _model, _args, kwargs: seen.append(kwargs), with_kwargs=True)
    for bounds, longest in (([0, 9, 24], 15), ([0, 16, 24], 16), ([0, 1, 24], 23)):
        ends = torch.tensor(bounds, dtype=torch.int32)
        model(
            input_ids=IDS[:1], use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest
        )
    assert [(each["max_length_q"], each["max_length_k"]) for each in seen] == [(16, 16), (16, 16), (32, 32)]
    assert all(each["cu_seq_lens_q"]._dynamo_weak_dynamic_indices == {0} for each in seen)
    model(input_ids=IDS[:1], use_cache=False)
    assert not {"cu_seq_lens_q", "max_length_q"} & set(seen[-1])
