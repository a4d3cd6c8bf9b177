"""Progress lines on a terminal or in a log, and standard streams that may fail. Imports: errors, text."""
