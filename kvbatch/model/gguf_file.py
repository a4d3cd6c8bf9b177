"""A GGUF file, or all parts of a split one, opened and told from what cannot be read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS, ReaderField, ReaderTensor
from gguf.quants import dequantize

from engine.model_files import described_stand_in
from kvbatch.errors import ModelUnavailable

_MAGIC = b"GGUF"
_ANOTHER = "use a file quantized otherwise, such as Q8_0 or Q4_K_M, or the model's safetensors version"
_MERGE = "name a file merged by llama-gguf-split --merge"


class Metadata(dict[str, Any]):
    """Key/value pairs of a GGUF file; one that is asked for and not there is named."""

    def __missing__(self, key: str) -> Any:
        raise ModelUnavailable(f"the GGUF file does not hold {key!r}; use another GGUF of the model")


class GgufFile:
    """The metadata and tensors of a model.

    Args:
        parts: its files, in order.
        title: what messages call it.

    Raises:
        ModelUnavailable: They are damaged, not of one model, or hold something that cannot be read exactly.
    """

    def __init__(self, parts: Sequence[Path], title: str):
        opened = [_opened(part, title if len(parts) == 1 else str(part)) for part in parts]
        _check_split([metadata for _, metadata in opened], title)
        self.metadata = opened[0][1]
        self.tensors: dict[str, ReaderTensor] = {}
        for part, (reader, _) in zip(parts, opened, strict=True):
            for tensor in reader.tensors:
                if tensor.name in self.tensors:
                    raise ModelUnavailable(
                        f"{part} holds tensor {tensor.name!r}, which a part before it holds too"
                    )
                self.tensors[tensor.name] = tensor
        wanted = self.metadata.get("split.tensors.count", len(self.tensors))
        if wanted != len(self.tensors):
            raise ModelUnavailable(
                f"the parts of {title} hold {len(self.tensors):,} tensors, not {wanted:,}; they are not of one model"
            )
        _check_types(self.tensors.values(), title)


class _Reader(GGUFReader):
    """Name the tensor whose type is not known, which the base class does not."""

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            number = int(field.parts[4][0])
            if number not in {kind.value for kind in GGMLQuantizationType}:
                raise ModelUnavailable(_unknown(field.name, f"type {number}"))
        super()._build_tensors(start_offs, fields)


def _opened(path: Path, title: str) -> tuple[GGUFReader, Metadata]:
    with path.open("rb") as stream:
        magic, version = stream.read(len(_MAGIC)), int.from_bytes(stream.read(4), "little")
    if magic and magic != _MAGIC:
        raise ModelUnavailable(
            described_stand_in(path)
            or f"{title} is no GGUF file, since it begins with {magic!r}; name another"
        )
    if version and version not in READER_SUPPORTED_VERSIONS:
        what = f"GGUF version {version}" if version < 1 << 16 else "a big-endian GGUF"
        raise ModelUnavailable(f"{title} is {what}, which is not read; use another GGUF of the model")
    try:
        reader = _Reader(path)
        return reader, Metadata((key, field.contents()) for key, field in reader.fields.items())
    except ModelUnavailable as error:
        raise ModelUnavailable(f"{title}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise ModelUnavailable(
            f"{title} is truncated or corrupt, {path.stat().st_size:,} bytes ({error}); fetch it again, "
            "or, if it is one piece of several, join them first"
        ) from error


def _check_split(found: Sequence[Metadata], title: str) -> None:
    count = found[0].get("split.count", 1)
    if len(found) == 1:
        if count > 1:
            raise ModelUnavailable(
                f"{title} is part {found[0]['split.no'] + 1} of {count} of a split GGUF, but its name does not say so; "
                f"name the parts NAME-00001-of-{count:05d}.gguf and so on, or {_MERGE}"
            )
        return
    for index, metadata in enumerate(found):
        number, of = metadata.get("split.no", 0) + 1, metadata.get("split.count", 1)
        if (number, of) != (index + 1, len(found)):
            raise ModelUnavailable(
                f"part {index + 1} of {len(found)} of {title} is part {number} of {of} by its own account; "
                f"give the parts their own names, or {_MERGE}"
            )


def _check_types(tensors: Any, title: str) -> None:
    """Undo one row of each kind of quantization, before anything is written."""
    for tensor in {tensor.tensor_type: tensor for tensor in tensors}.values():
        try:
            dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelUnavailable(f"{title}: {_unknown(tensor.name, tensor.tensor_type.name)}") from None


def _unknown(name: str, kind: str) -> str:
    return f"tensor {name!r} is quantized as {kind}, which cannot be read here; {_ANOTHER}"
