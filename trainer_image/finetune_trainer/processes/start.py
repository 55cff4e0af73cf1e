"""How processes of the trainer begin and end.

They end with their parent, do without torch if they can, and skip the work that Python's garbage collector and the end of its
interpreter put into a million objects of libraries.
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
    # Takes a tenth of a second, which processes that have no plan need not spend.
    from finetune_job.plan.run_plan import RunPlan

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
"""prctl(2)."""
_META_KERNELS = "torch._meta_registrations"
_TORCH_LIBRARIES = {"libtorch_global_deps.so": os.RTLD_GLOBAL, "libtorch_cpu.so": 0, "libtorch_cuda.so": 0}
"""In the order and with the flags of torch's own import."""
_bringing = threading.Lock()
_mapping: list[threading.Thread] = []
NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables with which numpy's linear algebra and tokenizers start no threads. A process that may be forked sets them before it
imports either."""
NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Keeps transformers from saying that torch is missing."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def send_output_to(descriptor: int) -> None:
    """Let this process write its output, native libraries' included, line by line into a descriptor, which is taken over."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def name_process(name: str) -> None:
    """Name this process for `ps` and /proc/PID/comm; a fork keeps its parent's command line. Of 15 bytes at most."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def name_of_process(pid: int) -> str:
    """What `name_process` said there; empty where no such process runs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def start_no_threads() -> None:
    """Have libraries that this process has not imported yet start no threads, unless its environment says otherwise."""
    for name, value in NO_THREADS.items():
        os.environ.setdefault(name, value)


def keep_torch_out() -> None:
    """Make every import of torch in this process an ImportError, unless it is there already."""
    if "torch" not in sys.modules:
        _keep_out("torch")
        os.environ[NO_ADVICE] = "1"


def torch_is_here() -> bool:
    """Whether this process has imported torch."""
    return sys.modules.get("torch") is not None


def keep_bitsandbytes_out(plan: RunPlan | None = None) -> None:
    """Make every import of bitsandbytes in this process an ImportError, unless it is there already or the plan may need it.

    plan: None where nothing needs it.

    PEFT imports it if it is installed, and with it torch's compiler: a fifth of the processor time that a rank's imports take.
    """
    if (plan is None or not may_need_bitsandbytes(plan)) and "bitsandbytes" not in sys.modules:
        _keep_out("bitsandbytes")


def keep_meta_kernels_out() -> None:
    """Have torch come without the kernels that it has in Python for tensors without values, unless it is there already.

    They are a third of its import. What builds modules without values calls `bring_meta_kernels` first.
    """
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)


def bring_meta_kernels() -> None:
    """Undo `keep_meta_kernels_out`. May be called by several threads."""
    with _bringing:
        if _META_KERNELS in sys.modules and sys.modules[_META_KERNELS].__spec__ is None:
            del sys.modules[_META_KERNELS]
            import_module(_META_KERNELS)


def may_need_bitsandbytes(plan: RunPlan) -> bool:
    """Whether the plan packs its base, or has code of which nobody knows what it imports."""
    return plan.method.quantization is not None or plan.model.allow_remote_code


def compile_conversions() -> None:
    """Compile the expressions by which transformers renames weights, of all models: 0.4 s in every process that loads one."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def map_torch_libraries() -> None:
    """Begin to bring torch's libraries into this process, in a thread; `preload` waits for it.

    That is a third of torch's import, in which Python's lock is held. Here it is not, so that the process can read its plan and
    headers meanwhile. It should have its modules by then: an import of one in C waits for the loader of libraries, with Python's
    lock. What goes wrong is left to the import to say.
    """
    found = importlib.util.find_spec("torch") if "torch" not in sys.modules and not _mapping else None
    if found is None or not found.submodule_search_locations or sys.platform != "linux":
        return
    folder = Path(found.submodule_search_locations[0], "lib")
    _mapping.append(threading.Thread(target=_map_libraries, args=(folder,), daemon=True))
    _mapping[0].start()


def _map_libraries(folder: Path) -> None:
    # Not ctypes.CDLL, which keeps Python's lock; a foreign function does not.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _TORCH_LIBRARIES.items():
        dlopen(os.fsencode(folder / name), os.RTLD_NOW | flags)


def _keep_out(module: str) -> None:
    # The documented way: https://docs.python.org/3/reference/import.html#the-module-cache. `find_spec` finds nothing then.
    sys.modules[module] = None  # type: ignore[assignment]


def preload(*modules: str) -> None:
    """Import what this process will need. The collector does not run meanwhile, and never visits what is there afterwards.

    What torch and the libraries around it bring lives as long as the process: collections would go through it in vain.
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
    """End this process at once, with its output written.

    An interpreter that ends takes every module apart, two seconds of CPU after torch; and threads of collective libraries can
    keep a failed one from ending. What has to happen at the end is in the caller's context managers, not in `atexit`.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
