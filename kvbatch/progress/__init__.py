"""What a running command shows: progress, and the streams it prints to. May import kvbatch.errors and kvbatch.text."""
