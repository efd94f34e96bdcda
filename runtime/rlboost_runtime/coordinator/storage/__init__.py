"""What the coordinator keeps so that a restart loses nothing: token store, journal and event log.

Enter at `token_store` for responses and at `journal` for what came in. Imported by `driver` and `observers`.
"""
