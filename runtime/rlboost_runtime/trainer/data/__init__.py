"""Prompts: from a file or a generated task, shuffled and repeated the same way after a restart."""
