"""What can go wrong between token ids and token ids.

EngineError
├── ModelError               weights or configuration missing or corrupt
│   └── UnsupportedModelError    an architecture or feature this engine does not run
└── BudgetError              the byte budget cannot hold what was asked for
"""

from collections.abc import Mapping


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """The model's files are missing, corrupt or contradict each other."""


class UnsupportedModelError(ModelError):
    """The model needs something that the engine does not have, named in the message."""


class BudgetError(EngineError):
    """The byte budget is too small, with the numbers.

    Args:
        reason: what does not fit.
        increase: fields of `EngineConfig` that need a larger value.
        decrease: fields of `EngineConfig` of which one may have a smaller value instead.
    """

    def __init__(
        self, reason: str, *, increase: tuple[str, ...] = (), decrease: tuple[str, ...] = ()
    ) -> None:
        self.reason, self.increase, self.decrease = reason, increase, decrease
        super().__init__(self.message())

    def message(self, names: Mapping[str, str] | None = None) -> str:
        """Return reason and remedy.

        Args:
            names: what the reader calls the fields, where that is not the field's own name.
        """
        names = names or {}
        more, less = (
            " and ".join(names.get(field, field) for field in fields)
            for fields in (self.increase, self.decrease)
        )
        remedies = [f"increase {more}"] if more else []
        remedies += [f"decrease {less}"] if less else []
        return "; ".join([self.reason, *filter(None, [" or ".join(remedies)])])
