"""How the engine stores keys and values, whole or compressed, behind one protocol. Imports: every package below it."""
