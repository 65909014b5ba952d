"""Text as folders of tokens."""
