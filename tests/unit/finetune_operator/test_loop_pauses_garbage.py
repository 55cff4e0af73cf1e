"""How often the garbage collector goes through what the operator holds. In a process of its own, with an own collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import finetune_operator
from finetune_operator import loop_pauses

_HOLDS = "held = [[number] for number in range(300_000)]\n"
"""A list holds each, so that the collector visits them all."""
_CYCLE = "class Item: pass\nitem = Item()\nitem.self = item\nimport weakref\nseen = weakref.ref(item)\ndel item\n"
_OLDEST = "gc.get_stats()[2]['collections']"


def told(code: str) -> int:
    source = str(Path(finetune_operator.__file__).parents[1])
    start = f"import gc, sys\nsys.path.insert(0, {source!r})\nfrom finetune_operator import loop_pauses\n"
    command = [sys.executable, "-c", start + code]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_a_cache_that_grows_is_not_gone_through_each_time() -> None:
    assert told(f"{_HOLDS}print({_OLDEST})") > 2, "otherwise this shows nothing"
    assert told(f"loop_pauses.collect_rarely()\n{_HOLDS}print({_OLDEST})") == 0


def test_what_the_first_list_brought_is_not_visited_again() -> None:
    assert told(f"{_HOLDS}loop_pauses.freeze_objects()\nprint(len(gc.get_objects()))") < 1_000
    assert told(f"{_HOLDS}loop_pauses.freeze_objects()\nprint(gc.get_freeze_count())") > 300_000


def test_garbage_of_the_start_is_collected_before() -> None:
    assert told(f"{_CYCLE}loop_pauses.freeze_objects()\nprint(int(seen() is None))") == 1


def test_garbage_that_comes_later_is_collected() -> None:
    filled = "young = [[] for _ in range(60_000)]\n"
    assert told(f"loop_pauses.collect_rarely()\nloop_pauses.freeze_objects()\n{_CYCLE}{filled}print(int(seen() is None))") == 1


def test_the_operator_sets_it_before_it_reads_anything() -> None:
    """Its command line is refused, which comes after."""
    code = "import sys\nfrom finetune_operator.__main__ import main\nsys.argv = ['operator', '--nothing-takes-this']\n"
    assert told(f"{code}try:\n    main()\nexcept SystemExit:\n    print(gc.get_threshold()[0])") == loop_pauses.THRESHOLDS[0]
