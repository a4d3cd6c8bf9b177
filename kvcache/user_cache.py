"""Where the user's cache lies; what is kept in it is tabled in `kvbatch.cache_folder`."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the directory that `KVBATCH_CACHE` names, else `~/.cache/kvbatch`; it need not be there yet.

    Raises:
        FileNotFoundError: This user has no home directory.
    """
    path = os.path.expanduser(os.environ.get("KVBATCH_CACHE") or "~/.cache/kvbatch")
    if path.startswith("~"):  # neither HOME nor an entry in the list of users
        raise FileNotFoundError(f"there is no home directory for {path}")
    return Path(path).absolute()
