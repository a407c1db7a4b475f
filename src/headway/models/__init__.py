"""Models: the resolution of names to files, and the conversion of the default model."""
