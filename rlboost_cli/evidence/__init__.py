"""Whether a run kept its promises: the audit of an ended one, and faults on purpose in a running one.

Enter at `audit.audit_of` and `chaos.make_faults`. `rlboost_runtime.audit.run` is what checks.
"""
