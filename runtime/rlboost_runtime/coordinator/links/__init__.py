"""The coordinator's open connections: to agents, to the trainer, and to those who ask for weights.

Enter at `server`, the HTTP and WebSocket application. Imported by `coordinator.service` only.
"""
