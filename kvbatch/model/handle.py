"""A job's model: found, described and, only when rows wait for it, loaded."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.errors import ModelUnavailable
from kvbatch.job_file.sections import EngineSection, ModelSection

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from engine.models.basis import BasisTable
    from engine.models.config import ModelConfig
    from engine.models.decoder import Decoder
    from kvbatch.model.precision import KeptPrecision, Precision
    from kvbatch.model.threads import Threads
    from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, as they were found.

    Args:
        directory: where they lie on this machine.
        revision: identity of their content.
        listing: see `describe_model_files`.
        num_weights: how many numbers the weights consist of.
        notes: what the user should know about the files.
    """

    directory: Path
    revision: str
    listing: list[dict[str, Any]]
    num_weights: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelHandle:
    """A model of a job, all but its weights.

    Args:
        tokenizer: from transformers.
        device: `cpu` or `cuda`.
        precision: of weights and arithmetic, with the reason for it.
        threads: number of CPU threads, with the reason for it.
        basis: in which the model is loaded for the job's cache policy.
    """

    section: ModelSection
    config: "ModelConfig"
    files: ModelFiles
    tokenizer: "PreTrainedTokenizerBase"
    device: str
    precision: "Precision"
    threads: "Threads"
    basis: "BasisTable"

    @property
    def dtype(self) -> "torch.dtype":
        """Precision of weights and arithmetic."""
        import torch

        return getattr(torch, self.precision.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory at most; a kernel that keeps them in bfloat16 takes half."""
        num_weights = self.files.num_weights
        if self.section.weight_quant is None:
            return num_weights * self.dtype.itemsize
        config = self.config
        num_words = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        return num_words * self.dtype.itemsize + num_weights - num_words

    @property
    def tokenizer_hash(self) -> str:
        """A hash over the tokenizer and its chat template, in hex digits."""
        parts = (self.tokenizer.backend_tokenizer.to_str(), str(self.tokenizer.chat_template))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @cached_property
    def decoder(self) -> "Decoder":
        """The model with its weights, loaded at the first access.

        Raises:
            ModelUnavailable: They are missing, corrupt, or do not fit into memory.
        """
        import torch

        from engine.errors import ModelError
        from engine.models import load_model
        from kvbatch.model.source import describe_model_files

        try:
            decoder = load_model(
                self.files.directory,
                dtype=self.dtype,
                device=self.device,
                max_context=self.section.max_context,
                trust_remote_code=self.section.trust_remote_code,
                weight_quant=self.section.weight_quant,
                basis=self.basis,
            )
        except ModelError as error:
            raise ModelUnavailable(f"model {self.section.name}: {error}") from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelUnavailable(
                f"model {self.section.name}: {self.weight_bytes:,} bytes of weights do not fit into the "
                f"memory of {self.device}; use a smaller model or dtype"
            ) from error
        directory = self.files.directory
        if describe_model_files(str(directory)) != self.files.listing:
            raise ModelUnavailable(
                f"model {self.section.name}: its files in {directory} changed since the job began; start it again"
            )
        return decoder


def open_model(
    section: ModelSection,
    engine: EngineSection,
    policy: "KVCacheConfig",
    *,
    kept: "KeptPrecision | None" = None,
    look_only: bool = False,
) -> ModelHandle:
    """Find the model, read its configuration and tokenizer, and check the files of its weights.

    Args:
        policy: of the cache that the model is loaded for.
        kept: precision of the run whose rows are reused beside the job's own.
        look_only: fetch nothing; a device or weights that are absent are no error.

    Raises:
        ModelUnavailable: The model or the device cannot be used; the message says what to do.
        ModelAbsent: With `look_only`, the model is not on this machine yet.
    """
    import torch
    import transformers

    from engine.errors import ModelError
    from engine.model_files import holds_weights
    from engine.models.basis import basis_for
    from engine.models.config import ModelConfig
    from engine.models.weights import check_weights, count_weights
    from kvbatch.model.precision import choose_precision
    from kvbatch.model.source import describe_model_files, resolve_model
    from kvbatch.model.threads import choose_threads

    device = resolve_device("auto" if look_only else engine.device)
    if section.weight_quant and device != "cpu":
        raise ModelUnavailable(
            f"model.weight_quant {section.weight_quant} is for CPUs, but the job runs on {device}; leave it out"
        )
    threads = choose_threads(engine.threads, torch.get_num_threads())
    torch.set_num_threads(threads.count)
    try:
        source = resolve_model(
            section.path, revision=section.revision, sha256=section.sha256, look_only=look_only
        )
    except OSError as error:
        raise ModelUnavailable(f"model {section.name} cannot be read: {error}; check model.path") from error
    path, listing = source.path, describe_model_files(str(source.path))
    try:
        config = ModelConfig.from_pretrained(
            path, max_context=section.max_context, trust_remote_code=section.trust_remote_code
        )
        notes: tuple[str, ...] = ()
        if not look_only or holds_weights(path):
            config, notes = check_weights(path, config)
        num_weights = count_weights(config)
    except ModelError as error:
        raise ModelUnavailable(f"model {section.name}: {error}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=section.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # of many kinds; each means that there is no usable tokenizer
        raise ModelUnavailable(
            f"model {section.name}: its tokenizer cannot be loaded from {path} ({_first_line(error)}); "
            "put the model's tokenizer.json and tokenizer_config.json there"
        ) from error
    precision = choose_precision(section.dtype, device, section.weight_quant, kept=kept)
    return ModelHandle(
        section=section,
        config=config,
        files=ModelFiles(path, source.revision, listing, num_weights, notes),
        tokenizer=tokenizer,
        device=device,
        precision=precision,
        threads=threads,
        basis=basis_for(policy, section.weight_quant),
    )


def resolve_device(name: str) -> str:
    """Return `cpu` or `cuda` for a job file's device.

    Raises:
        ModelUnavailable: A GPU is asked for and there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ModelUnavailable("engine.device is cuda, but torch finds no GPU here; use device: auto or cpu")
    return "cuda" if available and name != "cpu" else "cpu"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
