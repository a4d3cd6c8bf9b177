"""How the engine keeps keys and values: whole pages, or a compressed cache, behind one protocol."""
