"""The cache section: a preset, and a key for each field of `kvcache.config.KVCacheConfig` that differs from it.

The keys, their types and their meanings are read from that class. A field added there becomes a job key.
"""

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, WithJsonSchema, create_model, model_validator

from kvbatch.job_file.sections.base import Section
from kvcache.config import BUDGETS, PRESETS, KVCacheConfig
from kvcache.promises import KEPT_KEYS, PROMISES, Promise
from kvcache.scorers.registry import SCORERS

_NO_KEYS = ("page_tokens",)  # fields that no job sets


def _one_of(names: tuple[str, ...]) -> Any:
    """Return the type of a key whose values the policy validates and the job file's schema lists."""
    schema = {"anyOf": [{"enum": list(names), "type": "string"}, {"type": "null"}]}
    return Annotated[str | None, WithJsonSchema(schema)]


# fields whose type in a job file differs from their type in Python
_TYPES = {
    "tiers": tuple[tuple[float, int, int], ...] | None,
    "scorer": _one_of(tuple(SCORERS)),
    "budget": _one_of(BUDGETS),
}


def _meanings(policy: type) -> dict[str, str]:
    """Return the meaning of each argument from the docstring of a class, as sentences."""
    found: dict[str, list[str]] = {}
    name = None
    for line in (policy.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0].splitlines():
        if start := re.match(r"        (\w+): (.*)", line):
            name, text = start.groups()
            found[name] = [text[:1].upper() + text[1:]]
        elif name:
            found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def _policy_keys() -> dict[str, Any]:
    """Return the fields of the section's model. Null means the preset's value."""
    hints, meanings = get_type_hints(KVCacheConfig), _meanings(KVCacheConfig)
    return {
        field.name: (
            _TYPES.get(field.name, hints[field.name] | None),
            Field(None, description=meanings.get(field.name)),
        )
        for field in fields(KVCacheConfig)
        if field.name not in _NO_KEYS
    }


if TYPE_CHECKING:

    class _Keys(Section):
        preset: str = "none"
else:
    _Keys = create_model(
        "_Keys",
        __base__=Section,
        preset=(
            Literal[tuple(PRESETS)],
            Field("none", description="Named cache policy. The keys below override its values."),
        ),
        **_policy_keys(),
    )


class CacheSection(_Keys):
    """How keys and values are cached: a preset, and the keys that differ from it (`kvcache.config`)."""

    @model_validator(mode="after")
    def _is_a_policy(self) -> "CacheSection":
        self.policy  # noqa: B018 raises what is wrong with it
        return self

    @property
    def policy(self) -> KVCacheConfig:
        """The whole policy."""
        return KVCacheConfig.from_dict(self.model_dump(exclude_none=True))

    @property
    def changes(self) -> tuple[tuple[str, Any], ...]:
        """The keys that differ from the preset, with their values."""
        return tuple(sorted(self.model_dump(exclude_none=True, exclude={"preset"}).items()))

    @property
    def promise(self) -> Promise | None:
        """What the preset promises to lose at most; None where nothing is promised, or keys say what is kept."""
        is_literal = any(name in KEPT_KEYS for name, _ in self.changes)
        return None if is_literal else PROMISES.get(self.preset)
