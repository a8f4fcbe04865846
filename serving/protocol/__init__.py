"""Wire formats, free of any web framework: bytes in, named arrays out, and back."""
