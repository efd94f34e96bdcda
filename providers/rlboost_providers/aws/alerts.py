"""A budget of AWS Budgets that counts what carries an owner's tag."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from rlboost_providers.aws.errors import code_of, explained
from rlboost_providers.aws.machines import client
from rlboost_providers.base.alerts import SHARES, BudgetAlert, name_of
from rlboost_providers.base.tags import OWNER
from rlboost_runtime.errors import ConfigError, RLBoostError

REGION = "us-east-1"
"""Where AWS has billing, for all regions."""
_ACTIVATE = (
    f"activate the cost allocation tag {OWNER} (Billing > Cost allocation tags), or nothing is counted; "
    "AWS lists it a day after your first machine"
)


class AwsAlerts:
    """The `BudgetAlerts` of an AWS account."""

    def __init__(self, email: str | None, budgets: Any = None, sts: Any = None, costs: Any = None) -> None:
        """`email`: who is told; None: only `delete` works. The clients are boto3's of these services; None:
        the user's own."""
        self._email = email
        self._budgets = budgets or client("budgets", REGION)
        self._sts = sts or client("sts", REGION)
        self._costs = costs or client("ce", REGION)

    def set(self, owner: str, usd_per_month: float) -> BudgetAlert:
        """See `BudgetAlerts`. Raises `ConfigError` without an address."""
        if not self._email:
            raise ConfigError("AWS needs an address to send mail to", "add --email ADDRESS")
        self.delete(owner)
        tag = f"user:{OWNER}${owner}"
        reader = {"SubscriptionType": "EMAIL", "Address": self._email}
        limits = [("ACTUAL", share) for share in SHARES] + [("FORECASTED", 1.0)]
        with explained("make a budget"):
            self._budgets.create_budget(
                AccountId=self._account,
                Budget={
                    "BudgetName": name_of(owner),
                    "BudgetLimit": {"Amount": f"{usd_per_month:.2f}", "Unit": "USD"},
                    "CostFilters": {"TagKeyValue": [tag]},
                    "TimeUnit": "MONTHLY",
                    "BudgetType": "COST",
                },
                NotificationsWithSubscribers=[
                    {
                        "Notification": {
                            "NotificationType": kind,
                            "ComparisonOperator": "GREATER_THAN",
                            "Threshold": 100 * share,
                            "ThresholdType": "PERCENTAGE",
                        },
                        "Subscribers": [reader],
                    }
                    for kind, share in limits
                ],
            )
        notes = () if self._activate() else (_ACTIVATE,)
        return BudgetAlert(name_of(owner), usd_per_month, f"what has the tag {OWNER}={owner}", notes)

    def delete(self, owner: str) -> bool:
        """See `BudgetAlerts`."""
        try:
            with explained("delete a budget"):
                self._budgets.delete_budget(AccountId=self._account, BudgetName=name_of(owner))
        except RLBoostError as error:
            if isinstance(error.__cause__, Exception) and code_of(error.__cause__) == "NotFoundException":
                return False
            raise
        return True

    @cached_property
    def _account(self) -> str:
        with explained("ask which account this is"):
            return str(self._sts.get_caller_identity()["Account"])

    def _activate(self) -> bool:
        """Have AWS count costs by the owner's tag; return False if it cannot yet, or we may not."""
        wanted = [{"TagKey": OWNER, "Status": "Active"}]
        try:
            with explained("activate a tag"):
                found = self._costs.update_cost_allocation_tags_status(CostAllocationTagsStatus=wanted)
        except RLBoostError:
            return False
        return not found.get("Errors")
