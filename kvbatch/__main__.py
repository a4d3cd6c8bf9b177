"""Run the command line, as `kvbatch` or `python -m kvbatch`.

Signals are caught before the rest is imported, so that one which comes in the first moment has an ending, too.
"""

from kvbatch.signals import hold_signals


def main() -> None:
    """Run the command line and exit."""
    hold_signals()
    from kvbatch import cli

    cli.main()


if __name__ == "__main__":
    main()
