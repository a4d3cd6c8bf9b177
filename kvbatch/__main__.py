"""Run the command line as `python -m kvbatch`."""

from kvbatch.cli import main

if __name__ == "__main__":
    main()
