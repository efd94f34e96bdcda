"""The vLLM engine: its server as a child process, in a Python of its own."""
