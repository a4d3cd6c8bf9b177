"""The manifest of a run: a record of what was run, on what, by which versions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from kvbatch.run_dir.plan_file import PlanSummary

if TYPE_CHECKING:
    from engine.promise import FittedPolicy


@dataclass(frozen=True)
class ModelFacts:
    """What a manifest says of the model.

    Args:
        path: as the job names it, without credentials.
        revision: identity of the content.
        directory: where it lies.
        notes: what a user should know of it.
    """

    path: str
    revision: str
    directory: str
    architecture: str
    dtype: str
    weight_quant: str | None
    max_context: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """A run's manifest. What is not known yet is None or empty.

    Args:
        job: its name.
        created: UTC, ISO 8601.
        config_hash: of everything in the job that decides its output.
        number: by which the runs of a job are ordered, whatever the clock says.
        kvbatch: version.
        output_dir: of all runs of the job, without credentials.
        input_files: path, size and modification time of each.
        input_sha256: of each file, by its name within the input.
        model_files: those of a local model, with size, times and inode.
        memory_budget: as the job gives it.
        memory_budget_bytes: what that came to.
        skipped: files that the input's paths name and that were not read, by reason.
        prompt_time: what chat templates take for now, ISO 8601.
        prefix_tokens: that begin every prompt.
        semantic: keys that decide the output, dotted, with their values.
        operational: keys that decide where and how fast.
        reuse: which rows of earlier runs were reused (`kvbatch.run_dir.reuse.Reuse`).
        job_file, overridden: of the command that began the run: its job file, and the keys that -s changed.
        left_out: rows that `where` left out.
        cache_preset: as the job names it.
        cache_policy: what keeps the cache preset's promise (`engine.promise.FittedPolicy`).
        text_sha256: over the ids and texts of each input file's rows.
        quality: what the quality guard found.
        files: what describes the run's other files, by their name in the run directory.
    """

    job: str
    created: str
    config_hash: str
    input_files: tuple[dict[str, Any], ...]
    run_id: str | None = None
    number: int = 0
    kvbatch: str = ""
    working_directory: str | None = None
    output_dir: str = ""
    input_sha256: dict[str, str] = field(default_factory=dict)
    model_files: list[dict[str, Any]] = field(default_factory=list)
    memory_budget: Any = None
    memory_budget_bytes: int = 0
    versions: dict[str, str | None] = field(default_factory=dict)
    platform: str = ""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    prompt_time: str | None = None
    model: ModelFacts | None = None
    device: str | None = None
    precision: dict[str, Any] = field(default_factory=dict)
    threads: dict[str, Any] = field(default_factory=dict)
    prefix_tokens: int = 0
    semantic: dict[str, Any] = field(default_factory=dict)
    semantic_hash: str = ""
    operational: dict[str, Any] = field(default_factory=dict)
    operational_hash: str = ""
    reuse: dict[str, Any] = field(default_factory=dict)
    cache_preset: str = ""
    cache_policy: dict[str, Any] | None = None
    job_file: str | None = None
    overridden: tuple[str, ...] = ()
    plan: PlanSummary | None = None
    num_rows: int | None = None
    left_out: int = 0
    text_sha256: dict[str, str] = field(default_factory=dict)
    predicted_kv_peak_bytes: int = 0
    quality: dict[str, Any] | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def num_shards(self) -> int:
        """Shards of the plan; 0 as long as there is none."""
        return self.plan.num_shards if self.plan else 0

    @property
    def time(self) -> datetime | None:
        """What the prompts' chat template took for now; None if that is not known."""
        try:
            return datetime.fromisoformat(self.prompt_time or "")
        except ValueError:
            return None

    @property
    def fitted(self) -> "FittedPolicy | None":
        """What keeps the cache preset's promise; None if that was not measured, or is damaged."""
        from engine.promise import FittedPolicy

        try:
            return FittedPolicy.from_dict(self.cache_policy or {})
        except (TypeError, KeyError, ValueError):
            return None

    @property
    def revision(self) -> str | None:
        """Identity of the model's content, once that is known."""
        return self.model.revision if self.model else None

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Self:
        """Return the manifest that a record holds.

        Raises:
            TypeError, KeyError: It is not a manifest.
        """
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        if known.get("model"):
            model = known["model"]
            known["model"] = ModelFacts(**model | {"notes": tuple(model["notes"])})
        if known.get("plan"):
            known["plan"] = PlanSummary(**known["plan"])
        return cls(
            **known
            | {"input_files": tuple(known["input_files"]), "overridden": tuple(known.get("overridden", ()))}
        )

    def to_record(self) -> dict[str, Any]:
        """Return the record that holds the manifest: first what orders it among others, and nothing that is unknown."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        head = {key: values[key] for key in ("run_id", "number", "created") if key in values}
        return head | values
