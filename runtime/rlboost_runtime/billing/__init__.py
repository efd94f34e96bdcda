"""What a run costs: launch records, the ledger, the budget and the cost report.

Enter at `ledger.Ledger` while a run goes on and at `books` for runs that have ended. Amounts are exact
(`rlboost_runtime.money`). The coordinator, the supervisor and the CLI import this room; it imports no role.
"""
