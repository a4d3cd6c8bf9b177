"""`kvbatch cache`: what kvbatch keeps between runs, `list`, and its removal, `clear`."""

import sys
from collections.abc import Collection

import click

from kvbatch.cache_folder.contents import KINDS, Entry, look_into_cache, remove_entries
from kvbatch.cache_folder.text import line, render, render_kinds, render_left_alone, to_json, total_text
from kvbatch.commands.common import Parsed, guarded, print_json


@click.group()
def cache() -> None:
    """List or clear what is kept between runs: converted models, fitted presets, kernels, measurements."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every entry.")
@guarded
def list_(as_json: bool) -> int:
    """Say what the cache folder holds, how large and how old it is, and what it costs to lose it."""
    found = look_into_cache()
    if as_json:
        print_json(to_json(found))
    else:
        print("\n".join(render(found)))
    return 0


@cache.command()
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.name for kind in KINDS]),
    help="What to remove, all by default; may repeat.",
)
@click.option(
    "--older-than",
    "older_than_s",
    type=Parsed("kvbatch.signals", "parse_duration"),
    default=0.0,
    metavar="30d",
    help="Remove only what was written before that.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@guarded
def clear(kinds: tuple[str, ...], older_than_s: float, dry_run: bool, yes: bool) -> int:
    """Remove what kvbatch wrote to the cache folder, and nothing else; a later run makes it again."""
    found = look_into_cache(kinds, older_than_s)
    chosen = [entry for entry in found.entries if entry.state != "busy"]
    if not found.is_there:
        print(line("cache", f"{found.path}: not there, nothing is cached"))
        return 0
    for text in render_kinds(chosen):
        print(text)
    for text in render_left_alone(found):
        print(text)
    if dry_run or not chosen:
        print(line("dry run" if dry_run else "removed", total_text(chosen)))
    elif yes or _agrees(total_text(chosen)):
        _remove(chosen)
    else:
        print(line("removed", "nothing"))
    return 0


def _agrees(what: str) -> bool:
    """Ask on the terminal whether to go on; raises UsageError where there is none."""
    if not _is_terminal():
        raise click.UsageError(
            "nothing was removed: nobody can be asked here; add --yes, or look with --dry-run"
        )
    sys.stdout.flush()
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _remove(chosen: Collection[Entry]) -> None:
    """Remove entries; say what is gone even if the rest cannot be removed."""
    gone: list[Entry] = []
    try:
        for entry in remove_entries(chosen):
            gone.append(entry)
        for entry in chosen:
            if entry not in gone:
                print(line("left alone", f"{entry.path.name}: it is being made"))
    finally:
        print(line("removed", total_text(gone)))
