"""Output lengths: by task, or predicted from the prompt."""
