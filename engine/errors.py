"""What can go wrong between token ids and token ids.

EngineError
├── ModelError               weights or configuration missing or corrupt
│   └── UnsupportedModelError    an architecture or feature this engine does not run
└── BudgetError              the byte budget cannot hold what was asked for
"""


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """The model's files are missing, corrupt or contradict each other."""


class UnsupportedModelError(ModelError):
    """The model needs something that the engine does not have, named in the message."""


class BudgetError(EngineError):
    """The byte budget is too small, with the numbers."""
