"""`python -m finetune_trainer.merge.expression_trial`: matches regular expressions against names of modules, within bounds.

Standard input: `{"parent": PID, "seconds": N, "expressions": [...], "modules": [...]}`. It exits with 0 once all are matched.
"""

from __future__ import annotations

import json
import re
import sys

from finetune_trainer.processes.sandbox import limit_this_process
from finetune_trainer.processes.start import die_with, end


def main() -> int:
    order = json.load(sys.stdin)
    die_with(order["parent"])
    limit_this_process(order["seconds"])
    for expression in order["expressions"]:
        try:
            compiled = re.compile(expression)
        except (re.error, RecursionError, OverflowError):
            continue
        for module in order["modules"]:
            compiled.match(module)
            compiled.fullmatch(module)
    return 0


if __name__ == "__main__":
    end(main())
