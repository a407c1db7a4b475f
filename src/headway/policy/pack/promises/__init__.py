"""The packer of the default recipe."""
