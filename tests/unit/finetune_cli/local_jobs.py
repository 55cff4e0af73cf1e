"""Jobs of the accepted manifest, and their plan on this machine."""

import yaml

from finetune_cli.commands.run import local_plan
from finetune_job.api.job import FineTuneJob, parse_job
from tests.unit.finetune_cli.manifests import ACCEPTED


def job(**parallelism: int) -> FineTuneJob:
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["parallelism"] |= parallelism
    return parse_job(document)


def published() -> FineTuneJob:
    document = yaml.safe_load(ACCEPTED)
    document["spec"]["output"] = {"destination": "s3://results/tuned", "adapter": False}
    return parse_job(document)


PLAN = local_plan(job(), own_output=False)
