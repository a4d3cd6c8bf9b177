"""A job as it runs: session, shards, retries, limits. Imports: every package below it."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Let `kvbatch.run(job)` run a job, though `kvbatch.run` is also the package of the modules that do it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run a job; see `kvbatch.run.api.run`."""
        from kvbatch.run.api import run

        return run(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
