"""What is told about a run and changes nothing: its timeline, lost work, boot times and step times.

Each observer is handed events after the core has decided. Remove one and the run goes on as before.
"""
