"""The user's cache folder: what lies in it, and its removal. Imports: errors, text, model, kvcache."""
