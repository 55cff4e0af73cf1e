"""How processes of the trainer begin and end.

They end with their parent, do without torch if they can, and skip work of Python's garbage collector and of the interpreter's end
on a million objects of libraries.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    # Importing this takes a tenth of a second, which processes without a plan need not spend.
    from finetune_job.plan.run_plan import RunPlan

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
"""Options of prctl(2)."""
_META_KERNELS = "torch._meta_registrations"
_TORCH_LIBRARIES = {"libtorch_global_deps.so": os.RTLD_GLOBAL, "libtorch_cpu.so": 0, "libtorch_cuda.so": 0}
"""Libraries in the order and with the flags of torch's own import."""
_bringing = threading.Lock()
_mapping: list[threading.Thread] = []
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables with which numpy's linear algebra and tokenizers start no threads. A process that may be forked sets them before it
imports either.
"""
NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Variable that keeps transformers from warning that torch is missing."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def send_output_to(descriptor: int) -> None:
    """Redirect this process's output, native libraries' included, line by line to a descriptor, which is then closed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def name_process(name: str) -> None:
    """Name this process for `ps` and /proc/PID/comm; a fork keeps its parent's command line. name: at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def name_of_process(pid: int) -> str:
    """The name that `name_process` gave a process; empty if no such process runs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def start_no_threads() -> None:
    """Keep libraries that this process has not imported yet from starting threads, unless its environment says otherwise."""
    for name, value in NO_THREADS.items():
        os.environ.setdefault(name, value)


def keep_torch_out() -> None:
    """Make every import of torch in this process an ImportError, unless it is already imported."""
    if "torch" not in sys.modules:
        _keep_out("torch")
        os.environ[NO_ADVICE] = "1"


def torch_is_here() -> bool:
    """Whether this process has imported torch."""
    return sys.modules.get("torch") is not None


def keep_bitsandbytes_out(plan: RunPlan | None = None) -> None:
    """Make every import of bitsandbytes in this process an ImportError, unless it is already imported or the plan may need it.

    plan: None if nothing needs it.
    PEFT imports it if it is installed, and with it torch's compiler: a fifth of the processor time of a rank's imports.
    """
    if (plan is None or not may_need_bitsandbytes(plan)) and "bitsandbytes" not in sys.modules:
        _keep_out("bitsandbytes")


def keep_meta_kernels_out() -> None:
    """Let torch be imported without its Python kernels for the meta device, unless it is already imported.

    They are a third of its import. Code that builds modules on the meta device calls `bring_meta_kernels` first.
    """
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)


def bring_meta_kernels() -> None:
    """Undo `keep_meta_kernels_out`. Several threads may call this."""
    with _bringing:
        if _META_KERNELS in sys.modules and sys.modules[_META_KERNELS].__spec__ is None:
            del sys.modules[_META_KERNELS]
            import_module(_META_KERNELS)


def may_need_bitsandbytes(plan: RunPlan) -> bool:
    """Whether the plan quantizes its base, or has remote code, whose imports are unknown."""
    return plan.method.quantization is not None or plan.model.allow_remote_code


def compile_conversions() -> None:
    """Compile the expressions with which transformers renames weights of all models: 0.4 s in every process that loads one."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def map_torch_libraries() -> None:
    """Begin to load torch's libraries into this process, in a thread; `preload` waits for it.

    This is a third of torch's import, which holds Python's lock. The thread does not, so that the process can read its plan and
    headers meanwhile. The process should have imported its other modules by then: importing a C extension waits for the dynamic
    loader while it holds Python's lock. Errors are left to the import of torch.
    """
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules and not _mapping else None
    if spec is None or not spec.submodule_search_locations or sys.platform != "linux":
        return
    folder = Path(spec.submodule_search_locations[0], "lib")
    _mapping.append(threading.Thread(target=_map_libraries, args=(folder,), daemon=True))
    _mapping[0].start()


def _map_libraries(folder: Path) -> None:
    # Not ctypes.CDLL, which keeps Python's lock; calling a foreign function releases it.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _TORCH_LIBRARIES.items():
        dlopen(os.fsencode(folder / name), os.RTLD_NOW | flags)


def _keep_out(module: str) -> None:
    # The documented way: https://docs.python.org/3/reference/import.html#the-module-cache. `find_spec` then finds nothing.
    sys.modules[module] = None  # type: ignore[assignment]


def preload(*modules: str) -> None:
    """Import the modules that this process will need. The garbage collector is off meanwhile, and never visits their objects
    later.

    Objects of torch and the libraries around it live as long as the process, so collections would search them in vain.
    """
    start_no_threads()
    for thread in _mapping:
        thread.join()
    gc.disable()
    try:
        for module in modules:
            import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def end(code: int) -> NoReturn:
    """End this process at once, after writing its output.

    The normal end of an interpreter takes every module apart, two seconds of CPU after torch; and threads of collective libraries
    can keep a failed process from ending. What must happen at the end is in the caller's context managers, not in `atexit`.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
