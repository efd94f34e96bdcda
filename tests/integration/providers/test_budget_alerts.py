"""Budgets at the clouds: AWS's against moto, Google's against a server that keeps what it is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
import requests
from botocore.stub import Stubber
from moto import mock_aws
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_providers.aws.alerts import AwsAlerts
from rlboost_providers.base.tags import OWNER
from rlboost_providers.gcp.alerts import GcpAlerts
from rlboost_runtime.errors import ConfigError, CredentialsRejected

pytestmark = pytest.mark.integration

ACCOUNT = "123456789012"
ME, OTHER = "0123456789ab", "ba9876543210"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield boto3.client("budgets", region_name="us-east-1")


def costs(*, errors: list[dict[str, str]] | None = None, denied: bool = False) -> Any:
    client = boto3.client("ce", region_name="us-east-1")
    stub = Stubber(client)
    if denied:
        stub.add_client_error("update_cost_allocation_tags_status", "AccessDeniedException")
    else:
        stub.add_response(
            "update_cost_allocation_tags_status",
            {"Errors": errors or []},
            {"CostAllocationTagsStatus": [{"TagKey": OWNER, "Status": "Active"}]},
        )
    stub.activate()
    return client


def test_a_budget_counts_the_machines_of_one_home_and_mails_its_user(aws: Any) -> None:
    alert = AwsAlerts("me@example.org", costs=costs()).set(ME, 500)
    (budget,) = aws.describe_budgets(AccountId=ACCOUNT)["Budgets"]
    assert budget["BudgetName"] == alert.name == f"rlboost-{ME}"
    assert (budget["BudgetLimit"]["Amount"], budget["TimeUnit"]) == ("500.00", "MONTHLY")
    assert budget["CostFilters"] == {"TagKeyValue": [f"user:{OWNER}${ME}"]}
    found = aws.describe_notifications_for_budget(AccountId=ACCOUNT, BudgetName=alert.name)["Notifications"]
    assert sorted((each["NotificationType"], each["Threshold"]) for each in found) == [
        ("ACTUAL", 50), ("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100),
    ]  # fmt: skip
    assert alert.notes == ()


def test_a_budget_is_changed_and_deleted_and_others_stay(aws: Any) -> None:
    AwsAlerts("you@example.org", costs=costs()).set(OTHER, 10)
    AwsAlerts("me@example.org", costs=costs()).set(ME, 500)
    AwsAlerts("me@example.org", costs=costs()).set(ME, 50)
    found = {each["BudgetName"]: each for each in aws.describe_budgets(AccountId=ACCOUNT)["Budgets"]}
    assert found[f"rlboost-{ME}"]["BudgetLimit"]["Amount"] == "50.00"
    alerts = AwsAlerts("me@example.org")
    assert [alerts.delete(ME), alerts.delete(ME)] == [True, False]
    assert [each["BudgetName"] for each in aws.describe_budgets(AccountId=ACCOUNT)["Budgets"]] == [
        f"rlboost-{OTHER}"
    ]


@pytest.mark.parametrize(
    "refusal", [{"errors": [{"TagKey": OWNER, "Code": "NotFound", "Message": "no tag"}]}, {"denied": True}]
)
def test_a_tag_that_aws_does_not_count_yet_is_said(aws: Any, refusal: dict[str, Any]) -> None:
    alert = AwsAlerts("me@example.org", costs=costs(**refusal)).set(ME, 500)
    assert any(f"activate the cost allocation tag {OWNER}" in note for note in alert.notes)
    assert len(aws.describe_budgets(AccountId=ACCOUNT)["Budgets"]) == 1


class Billing(BaseHTTPRequestHandler):
    """Keeps budgets as Google's API does, two to a page; refuses other accounts than A-1."""

    budgets: dict[str, dict[str, Any]]
    asked: list[tuple[str, str]]

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked.append((self.command, self.headers.get("X-Goog-User-Project", "")))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        account, _, name = path.removeprefix("/billingAccounts/").partition("/budgets")
        name = name.strip("/")
        status, found = 200, {}
        if account == "A-2":
            status, found = 403, {"error": {"message": "The caller does not have permission"}}
        elif account != "A-1":
            status, found = 404, {"error": {"message": "Requested entity was not found."}}
        elif self.command == "GET":
            start = int(query.partition("pageToken=")[2] or 0)
            page = list(self.budgets.values())[start : start + 2]
            found = {"budgets": page}
            if start + 2 < len(self.budgets):
                found["nextPageToken"] = str(start + 2)
        elif self.command == "DELETE":
            del self.budgets[name]
        else:
            name = name or f"id-{len(self.budgets)}"
            found = {**body, "name": f"billingAccounts/A-1/budgets/{name}"}
            self.budgets[name] = found
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def google() -> Iterator[tuple[str, dict[str, dict[str, Any]], list[tuple[str, str]]]]:
    budgets: dict[str, dict[str, Any]] = {}
    asked: list[tuple[str, str]] = []
    handler = type("Handler", (Billing,), {"budgets": budgets, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", budgets, asked
        server.shutdown()


def test_google_counts_a_label_and_a_second_call_changes_the_same_budget(google) -> None:
    url, budgets, asked = google
    with requests.Session() as session:
        for number in range(4):
            GcpAlerts("A-1", session, "mine", url).set(f"{number:012d}", 10)
        alerts = GcpAlerts("A-1", session, "mine", url)
        alerts.set(ME, 500)
        alerts.set(ME, 99.5)
        (found,) = (each for each in budgets.values() if each["displayName"] == f"rlboost-{ME}")
        assert found["budgetFilter"] == {"labels": {OWNER: [ME]}, "calendarPeriod": "MONTH"}
        assert found["amount"] == {"specifiedAmount": {"units": "99", "nanos": 500_000_000}}
        assert [rule["thresholdPercent"] for rule in found["thresholdRules"]] == [0.5, 0.8, 1.0, 1.0]
        assert {project for _, project in asked} == {"mine"}
        assert [alerts.delete(ME), alerts.delete(ME)] == [True, False]
    assert len(budgets) == 4


@pytest.mark.parametrize(("account", "error"), [("A-2", CredentialsRejected), ("A-3", ConfigError)])
def test_what_google_refuses_is_said_with_a_remedy(google, account: str, error: type[Exception]) -> None:
    with requests.Session() as session, pytest.raises(error) as refused:
        GcpAlerts(account, session, "mine", google[0]).set(ME, 500)
    assert "billing" in str(refused.value).lower()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("aws", "--max-usd", "5"), "add --email"),
        (("gcp", "--max-usd", "5"), "add --billing-account"),
        (("azure", "--max-usd", "5"), "name aws or gcp"),
        (("aws", "--email", "me@example.org"), "give --max-usd or --delete"),
    ],
)
def test_what_is_missing_is_said(words: tuple[str, ...], problem: str) -> None:
    result = CliRunner().invoke(app, ["budget", *words])
    assert result.exit_code == 2
    assert problem in result.output
