"""`make demo-cluster`: install the chart on a real node, and run the example with 2 pods x 2 ranks to its end."""

import json
import subprocess
import sys
import time

from tools.cluster.requirements import unsupported_reason
from tools.stack import NAMESPACE, ROOT, Stack, condition_of

EXAMPLE = "examples/quickstart-cluster.yaml"


def main() -> int:
    """Run the demo. Returns the exit code: 0 if the job succeeded and its merged model loads without PEFT."""
    reason = unsupported_reason()
    if reason is not None:
        print(f"demo-cluster: {reason}", file=sys.stderr)
        return 2
    with Stack() as stack:
        print(f"export KUBECONFIG={stack.cluster.kubeconfig}\nkubectl apply -f {EXAMPLE}", flush=True)
        start = time.monotonic()
        name = stack.apply_example(EXAMPLE)
        shown = ""

        def finished() -> bool:
            nonlocal shown
            table = stack.cluster.kubectl("get", "ftj", "--namespace", NAMESPACE).splitlines()
            line = " ".join(table[-1].split()[:-1])
            if line != shown:
                print(f"{time.monotonic() - start:6.0f} s  {line}", flush=True)
                shown = line
            return condition_of(stack.job(name), "Finished").get("status") == "True"

        stack.wait(finished, f"{name} to finish")
        job = stack.job(name)
        print(stack.cluster.kubectl("get", "ftj", "--namespace", NAMESPACE, "--output", "wide"))
        print(json.dumps({key: job["status"].get(key) for key in ("progress", "artifacts", "restarts")}, indent=2))
        if condition_of(job, "Succeeded").get("status") != "True":
            stack.describe(print)
            return 1
        output = stack.claim("models-out") / name
        print((output / "verification.json").read_text())
        return subprocess.run([sys.executable, "-m", "tools.plain_load", output / "merged"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
