"""How the engine stores keys and values, whole or compressed, behind one protocol. Imports: every room below it."""
