"""The machines of a run: which offer to ask next, launching, watching and ending them.

Enter at `controller`. Calls of providers run in threads (`provider_calls`), because they block.
"""
