"""What a recipe may say, which keys exclude each other, and the published recipes."""
