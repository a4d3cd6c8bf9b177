"""The page of a run: figures, plots and markup."""
