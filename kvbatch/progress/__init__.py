"""What a running command shows: progress, and the streams it prints to. Imports: errors, text."""
