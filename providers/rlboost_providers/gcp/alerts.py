"""A budget of Google Cloud Billing that counts what carries an owner's label, by the Budget API's version 1.

Google mails whoever administers the account.
"""

from __future__ import annotations

from typing import Any

from rlboost_providers.base.alerts import SHARES, BudgetAlert, name_of
from rlboost_providers.base.tags import OWNER
from rlboost_providers.gcp.errors import explained
from rlboost_providers.gcp.provider import default_credentials
from rlboost_runtime.errors import ConfigError, CredentialsRejected, ProviderError

API = "https://billingbudgets.googleapis.com/v1"
CALL_S = 20.0
"""Longest wait for one answer."""
_RIGHTS = (
    "enable billingbudgets.googleapis.com in the project; you need the role Billing Account Costs Manager"
)


class GcpAlerts:
    """The `BudgetAlerts` of a billing account."""

    def __init__(self, billing_account: str, session: Any = None, project: str = "", api: str = API) -> None:
        """`session` signs requests, as google-auth's does; None: with the user's own credentials."""
        self._url = f"{api}/billingAccounts/{billing_account}/budgets"
        self._billing_account = billing_account
        if session is None:
            from google.auth.transport import requests

            credentials, project = default_credentials()
            make: Any = requests.AuthorizedSession  # has no types
            session = make(credentials)
        self._session = session
        self._project = project

    def set(self, owner: str, usd_per_month: float) -> BudgetAlert:
        """See `BudgetAlerts`. The amount is in the account's currency."""
        units = int(usd_per_month)
        budget = {
            "displayName": name_of(owner),
            "budgetFilter": {"labels": {OWNER: [owner]}, "calendarPeriod": "MONTH"},
            "amount": {
                "specifiedAmount": {"units": str(units), "nanos": round((usd_per_month - units) * 1e9)}
            },
            "thresholdRules": [
                *({"thresholdPercent": share, "spendBasis": "CURRENT_SPEND"} for share in SHARES),
                {"thresholdPercent": 1.0, "spendBasis": "FORECASTED_SPEND"},
            ],
        }
        known = self._known(owner)
        if known is None:
            self._ask("POST", self._url, budget)
        else:
            self._ask("PATCH", f"{self._url}/{known}", budget)
        return BudgetAlert(
            name_of(owner),
            usd_per_month,
            f"what has the label {OWNER}={owner}",
            ("Google mails the administrators of the billing account; the amount is in its currency",),
        )

    def delete(self, owner: str) -> bool:
        """See `BudgetAlerts`."""
        known = self._known(owner)
        if known is not None:
            self._ask("DELETE", f"{self._url}/{known}")
        return known is not None

    def _known(self, owner: str) -> str | None:
        """Return the id of an owner's budget."""
        page = ""
        while True:
            found = self._ask("GET", f"{self._url}?pageSize=1000&pageToken={page}")
            for budget in found.get("budgets", ()):
                if budget.get("displayName") == name_of(owner):
                    return str(budget["name"]).rpartition("/")[2]
            page = found.get("nextPageToken", "")
            if not page:
                return None

    def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"X-Goog-User-Project": self._project} if self._project else {}
        with explained("set a budget alert"):
            answer = self._session.request(method, url, json=body, headers=headers, timeout=CALL_S)
        if answer.status_code in (401, 403):
            raise CredentialsRejected(f"Google refuses to {method} a budget: {_said(answer)}", _RIGHTS)
        if answer.status_code in (400, 404):
            raise ConfigError(
                f"Google does not know billing account {self._billing_account}: {_said(answer)}",
                "`gcloud billing accounts list` shows the ids of yours",
            )
        if not answer.ok:
            raise ProviderError(f"Google answers {answer.status_code}: {_said(answer)}", "try again later")
        return dict(answer.json()) if answer.content else {}


def _said(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(answer.text[:200])
