"""Pulling a version: chunks from several sources at once, checked, and resumed after a cut.

Enter at `pull.pull`. Agents run it in a child process (`child`).
"""
