"""Where things are on the workspace and on the output claim: one table for trainer, operator and command line."""

import re
from dataclasses import dataclass
from pathlib import Path


def checkpoint_name(step: int) -> str:
    """Name of the directory of the checkpoint after an optimizer step; names sort like steps."""
    return f"step-{step:010d}"


def checkpoint_step(name: str) -> int | None:
    """The step in such a name; None for any other name."""
    match = re.fullmatch(r"step-(\d{10})", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class WorkspaceLayout:
    """Directories of one job under its own folder on the workspace claim."""

    root: Path

    @property
    def sources(self) -> Path:
        """What was fetched from outside the cluster: `model`, `data-<n>`, `validation`; each complete once it exists."""
        return self.root / "sources"

    @property
    def base_with_tokens(self) -> Path:
        """The base model with the tokens that the job adds: its tokenizer, and a row for each in the embeddings."""
        return self.root / "base-with-added-tokens"

    @property
    def added_tokens(self) -> Path:
        """Which tokens these are and what ids they have; written once the model is complete."""
        return self.root / "added-tokens.json"

    @property
    def accounts(self) -> Path:
        """One JSON object per line: how each attempt spent its time."""
        return self.root / "accounts.jsonl"

    @property
    def prepared(self) -> Path:
        """Tokenised and packed data, a manifest last."""
        return self.root / "prepared"

    @property
    def model_report(self) -> Path:
        """What preflight learnt from the model: wrap classes, trainable tensors, digests."""
        return self.root / "preflight.json"

    @property
    def first_values(self) -> Path:
        """What adapters that start from the base's own weights start with: computed once, read by every rank of every attempt."""
        return self.root / "first-values.safetensors"

    @property
    def checkpoints(self) -> Path:
        """A directory for each, by `checkpoint_name`."""
        return self.root / "checkpoints"

    @property
    def rank_zero(self) -> Path:
        """The attempt, and the port on which its rank 0 answers."""
        return self.root / "observe.json"

    @property
    def adapter(self) -> Path:
        """The trained adapter (or the trained model, for full fine-tuning), complete once it exists."""
        return self.root / "trained"

    @property
    def results(self) -> Path:
        """What goes to a destination outside the cluster, laid out as `OutputLayout` says."""
        return self.root / "results"

    @property
    def publication(self) -> Path:
        """One JSON object per line: what publishing remembers between two attempts, uploads under way and parts that are
        there.
        """
        return self.root / "publication.jsonl"

    @property
    def history(self) -> Path:
        """One JSON object per line and optimizer step."""
        return self.root / "history.jsonl"

    @property
    def trackers(self) -> Path:
        """What experiment trackers write: `tensorboard` always, others by their names."""
        return self.root / "trackers"

    def reports(self, role: str, attempt: int) -> Path:
        """Full termination reports of one role and attempt, a file per node rank."""
        return self.root / "reports" / f"{role}-{attempt}"

    def stacks(self, attempt: int) -> Path:
        """Stacks of ranks that stalled, a file per rank, and what the collective library recorded."""
        return self.root / "stacks" / f"train-{attempt}"

    def logs(self, role: str, attempt: int) -> Path:
        """Output of each rank, size-capped."""
        return self.root / "logs" / f"{role}-{attempt}"


@dataclass(frozen=True)
class MergedPaths:
    """Names of a merged model, by how far its verification is, and of what the verification says about it."""

    verified: Path
    """Its name as a result: only a model that has passed has it."""
    report: Path
    """As JSON."""
    page: Path
    """For people."""

    @property
    def unverified(self) -> Path:
        """Its name until the verification has passed."""
        return self.verified.with_name(f"{self.verified.name}.unverified")

    @property
    def quarantined(self) -> Path:
        """Its name if the verification has failed: the model is kept, and nobody takes it for a result."""
        return self.verified.with_name(f"{self.verified.name}.quarantined")

    @property
    def current(self) -> Path:
        """Where a merge writes. A model under its final name has passed before: the run before this one was killed after that."""
        return self.verified if self.verified.exists() else self.unverified


@dataclass(frozen=True)
class OutputLayout:
    """What the user finds at `output.destination`."""

    root: Path

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    @property
    def merged(self) -> Path:
        return self.root / "merged"

    def merged_paths(self, reports: Path | None = None) -> MergedPaths:
        """Of the merged model. reports: another directory for what the verification says; None: this one."""
        place = self if reports is None else OutputLayout(reports)
        return MergedPaths(self.merged, place.verification, place.verification_page)

    @property
    def verification(self) -> Path:
        return self.root / "verification.json"

    @property
    def verification_page(self) -> Path:
        """The verification for people."""
        return self.root / "verification.md"

    @property
    def report(self) -> Path:
        """The whole run on one page, for people."""
        return self.root / "report.html"

    @property
    def report_data(self) -> Path:
        """The same for programs."""
        return self.root / "report.json"

    @property
    def provenance(self) -> Path:
        """An in-toto statement: what was made, from what, by what."""
        return self.root / "provenance.json"

    @property
    def model_card(self) -> Path:
        return self.root / "README.md"

    @property
    def checksums(self) -> Path:
        """SHA-256 of every file, in the form that `sha256sum --check` reads; written last of all, so it proves completeness."""
        return self.root / "SHA256SUMS"
