"""Token ingest: how much of a core the coordinator needs for a million tokens per second."""
