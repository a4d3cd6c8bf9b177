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

    from engine.models.basis import BasisTable
    from engine.models.config import ModelConfig
    from engine.models.decoder import Decoder
    from kvbatch.model.precision import KeptPrecision, Precision
    from kvbatch.model.threads import Threads
    from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class ModelHandle:
    """Hold all of a model but its weights.

    Args:
        path: local directory.
        revision: identity of the content.
        tokenizer: from transformers.
        precision: of weights and arithmetic, and why it is that.
        threads: the same of CPU threads.
        num_weights: numbers that the weights consist of.
        files: those of the directory, as they were found.
        basis: what its heads are loaded in.
        notes: what a user should know of the model.
    """

    section: ModelSection
    path: Path
    revision: str
    config: "ModelConfig"
    tokenizer: Any
    device: str
    precision: "Precision"
    threads: "Threads"
    num_weights: int
    files: list[dict[str, Any]]
    basis: "BasisTable"
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> "torch.dtype":
        """Precision of weights and arithmetic."""
        import torch

        return getattr(torch, self.precision.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights will take in memory at most: what a kernel keeps in bfloat16 takes half."""
        if self.section.weight_quant is None:
            return self.num_weights * self.dtype.itemsize
        config = self.config
        num_words = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        return num_words * self.dtype.itemsize + self.num_weights - num_words

    @property
    def tokenizer_hash(self) -> str:
        """A hash over the tokenizer and its chat template, in hex digits."""
        parts = (self.tokenizer.backend_tokenizer.to_str(), str(self.tokenizer.chat_template))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @cached_property
    def decoder(self) -> "Decoder":
        """The model with its weights, loaded when first asked for.

        Raises:
            ModelUnavailable: They are missing, corrupt, or do not fit into memory.
        """
        import torch

        from engine.errors import ModelError
        from engine.models import load_model
        from kvbatch.model.source import describe_model_files

        try:
            decoder = load_model(
                self.path,
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
        if describe_model_files(str(self.path)) != self.files:
            raise ModelUnavailable(
                f"model {self.section.name}: its files in {self.path} changed since the job began; start it again"
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
        kept: precision of the run whose rows stand beside those of the job.
        look_only: fetch nothing, and do without the device and the weights if they are not here.

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
    path, files = source.path, describe_model_files(str(source.path))
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
    except (
        Exception
    ) as error:  # transformers raises many kinds; each means: there is no usable tokenizer here
        raise ModelUnavailable(
            f"model {section.name}: its tokenizer cannot be loaded from {path} ({_first_line(error)}); "
            "put the model's tokenizer.json and tokenizer_config.json there"
        ) from error
    precision = choose_precision(section.dtype, device, section.weight_quant, kept=kept)
    return ModelHandle(
        section,
        path,
        source.revision,
        config,
        tokenizer,
        device,
        precision,
        threads,
        num_weights,
        files,
        basis_for(policy, section.weight_quant),
        notes,
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


def resolve_dtype(name: str, device: str) -> "torch.dtype":
    """Return a torch dtype; `auto` is chosen as for a new run."""
    import torch

    from kvbatch.model.precision import choose_precision

    return getattr(torch, choose_precision(name, device).dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
