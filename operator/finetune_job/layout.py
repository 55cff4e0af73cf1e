"""The paths of files on the workspace and on the output claim, shared by trainer, operator and command line."""

import re
from dataclasses import dataclass
from pathlib import Path


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint that is saved after an optimizer step; names sort in the order of the steps."""
    return f"step-{step:010d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory; None for any other name."""
    match = re.fullmatch(r"step-(\d{10})", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class WorkspaceLayout:
    """Paths within one job's own folder on the workspace claim."""

    root: Path

    @property
    def sources(self) -> Path:
        """Files fetched from outside the cluster: `model`, `data-<n>`, `validation`; each appears only when it is complete."""
        return self.root / "sources"

    @property
    def base_with_tokens(self) -> Path:
        """The base model with the added tokens in its tokenizer, and a row for each of them in its embeddings."""
        return self.root / "base-with-added-tokens"

    @property
    def added_tokens(self) -> Path:
        """The added tokens with their ids; written once `base_with_tokens` is complete."""
        return self.root / "added-tokens.json"

    @property
    def accounts(self) -> Path:
        """Records of how each attempt spent its time, one JSON object per line."""
        return self.root / "accounts.jsonl"

    @property
    def prepared(self) -> Path:
        """Tokenised and packed data; its manifest is written last."""
        return self.root / "prepared"

    @property
    def model_report(self) -> Path:
        """Facts about the model that preflight has found: wrap classes, trainable tensors, digests."""
        return self.root / "preflight.json"

    @property
    def first_values(self) -> Path:
        """Initial values of adapters that are derived from the base weights: computed once, read by all ranks of all attempts."""
        return self.root / "first-values.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, each in a directory named by `checkpoint_name`."""
        return self.root / "checkpoints"

    @property
    def rank_zero(self) -> Path:
        """A file with the attempt number and the port on which rank 0 of this attempt serves its progress."""
        return self.root / "observe.json"

    @property
    def adapter(self) -> Path:
        """The trained adapter, or the trained model for full fine-tuning; it appears only when it is complete."""
        return self.root / "trained"

    @property
    def results(self) -> Path:
        """The results for a destination outside the cluster, in the layout of `OutputLayout`."""
        return self.root / "results"

    @property
    def publication(self) -> Path:
        """State that publishing keeps between attempts: open uploads and their completed parts, one JSON object per line."""
        return self.root / "publication.jsonl"

    @property
    def history(self) -> Path:
        """The training history: one JSON object per line for each optimizer step."""
        return self.root / "history.jsonl"

    @property
    def trackers(self) -> Path:
        """Files of experiment trackers, in one directory per tracker; `tensorboard` always exists."""
        return self.root / "trackers"

    def reports(self, role: str, attempt: int) -> Path:
        """Full termination reports of one role and attempt, one file per node rank."""
        return self.root / "reports" / f"{role}-{attempt}"

    def restarts(self, attempt: int) -> Path:
        """A JSON list of the restarts of ranks inside their pod, in one attempt of training."""
        return self.root / "restarts" / f"train-{attempt}.json"

    def stacks(self, attempt: int) -> Path:
        """Stack traces of stalled ranks, one file per rank, and the flight records of the collective library."""
        return self.root / "stacks" / f"train-{attempt}"

    def logs(self, role: str, attempt: int) -> Path:
        """Output of each rank, up to a maximum size."""
        return self.root / "logs" / f"{role}-{attempt}"


@dataclass(frozen=True)
class MergedPaths:
    """Paths of a merged model before and after its verification, and of the verification's reports."""

    verified: Path
    """Path of the model as a result: only a verified model has this name."""
    report: Path
    """The report as JSON."""
    page: Path
    """The report for human readers."""

    @property
    def unverified(self) -> Path:
        """Path of the model until its verification has passed."""
        return self.verified.with_name(f"{self.verified.name}.unverified")

    @property
    def quarantined(self) -> Path:
        """Path of a model whose verification has failed: it is kept, but is not a result."""
        return self.verified.with_name(f"{self.verified.name}.quarantined")

    @property
    def current(self) -> Path:
        """Path to which a merge writes: `verified` if an earlier merge was killed after verification, else `unverified`."""
        return self.verified if self.verified.exists() else self.unverified


@dataclass(frozen=True)
class OutputLayout:
    """The files that the user finds at `output.destination`."""

    root: Path

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    def merged_paths(self, reports: Path | None = None) -> MergedPaths:
        """Return the paths of the merged model. reports: directory of the verification's reports; None for this directory."""
        place = self if reports is None else OutputLayout(reports)
        return MergedPaths(self.merged, place.verification, place.verification_page)

    @property
    def verification(self) -> Path:
        return self.root / "verification.json"

    @property
    def verification_page(self) -> Path:
        """The verification report for human readers."""
        return self.root / "verification.md"

    @property
    def report(self) -> Path:
        """The report of the whole run on one page, for human readers."""
        return self.root / "report.html"

    @property
    def report_data(self) -> Path:
        """The report for programs."""
        return self.root / "report.json"

    @property
    def provenance(self) -> Path:
        """An in-toto statement of the results, their inputs, and the program that produced them."""
        return self.root / "provenance.json"

    @property
    def model_card(self) -> Path:
        return self.root / "README.md"

    @property
    def checksums(self) -> Path:
        """SHA-256 of every file, in the format of `sha256sum --check`. It is written last, so its presence shows completeness."""
        return self.root / "SHA256SUMS"
