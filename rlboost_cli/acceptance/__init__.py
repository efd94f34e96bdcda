"""`rlboost acceptance`: the first contact with a cloud account, as a list of checks within a budget.

Enter at `acceptance.runner`; `acceptance.steps` has the checks in order of cost.
"""
