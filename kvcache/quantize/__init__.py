"""Keys and values quantized to pages of packed codes, and back: the reference, in torch. Imports: sizes."""
