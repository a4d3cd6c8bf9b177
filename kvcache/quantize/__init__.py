"""Keys and values to pages of packed codes and back, in torch. Imports: sizes."""
