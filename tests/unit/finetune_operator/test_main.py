"""How often the garbage collector visits what the operator holds. Each program of a test is a process of its own."""

import subprocess
import sys
from pathlib import Path

import finetune_operator
from finetune_operator.__main__ import COLLECTOR_THRESHOLDS

START = """import gc, sys
sys.path.insert(0, {source!r})
from finetune_operator.__main__ import main
from finetune_operator.app import freeze_objects
sys.argv = ["operator", "--nothing-takes-this"]  # refused after the thresholds are set
try:
    main()
except SystemExit:
    pass
"""


def printed(code: str) -> int:
    start = START.format(source=str(Path(finetune_operator.__file__).parents[1]))
    return int(
        subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True, timeout=60).stdout
    )


def test_a_cache_that_grows_is_not_visited_each_time() -> None:
    assert printed("print(gc.get_threshold()[0])") == COLLECTOR_THRESHOLDS[0]
    grows = "before = gc.get_stats()[2]['collections']\nheld = [[number] for number in range(300_000)]\n"
    assert printed(f"{grows}print(gc.get_stats()[2]['collections'] - before)") == 0


def test_what_the_first_list_brought_is_not_visited_again_and_later_garbage_is_collected() -> None:
    cycle = "class Item: pass\nitem = Item()\nitem.self = item\nimport weakref\nseen = weakref.ref(item)\ndel item\n"
    assert printed("freeze_objects()\nprint(len(gc.get_objects()))") < 1_000
    assert printed(f"{cycle}freeze_objects()\nprint(int(seen() is None))") == 1
    assert printed(f"freeze_objects()\n{cycle}young = [[] for _ in range(60_000)]\nprint(int(seen() is None))") == 1
