"""Machines that the user names: reached over SSH, never bought and never ended."""
