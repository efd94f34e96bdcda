"""A new user sets up AWS by our pages alone: each is typed, to AWS's own tool and an API that answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import boto3
import pytest
from cloudlab.client import Lab

from rlboost_providers.skypilot.session import VARIABLE
from tests.setup_commands import role_of_heads, role_of_workers, set_up

ACCOUNT = "123456789012"
SHIPPED = files("rlboost_templates").joinpath("policies/aws.json")
ANSWERS = "AKIANEWUSER\nnew-secret\nus-east-2\njson\n"
"""To what `aws configure` asks."""


@pytest.fixture
def shell(lab: Lab, sky_user: dict[str, str], tmp_path: Path) -> Any:
    """A shell of somebody who has nothing yet but the tools."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "aws").symlink_to(Path(sky_user[VARIABLE]).with_name("aws"))
    for name, words in (("python", ""), ("rlboost", "-m rlboost_cli.main")):  # a venv's, wherever that is
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "HOME": str(tmp_path), "AWS_ENDPOINT_URL": lab.url, "PATH": f"{tools}:/usr/bin:/bin",
        "RLBOOST_HOME": str(tmp_path / "runs"), "AWS_PAGER": "",
    }  # fmt: skip

    def typed(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command.replace("ME", "new-user").replace("ACCOUNT", ACCOUNT)],
            env=environment, input=ANSWERS, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return typed


def test_the_five_commands_make_a_user_who_may_do_what_we_do(lab: Lab, account: Any, shell: Any) -> None:
    iam: Any = boto3.client("iam", region_name="us-east-1", endpoint_url=lab.url)
    iam.create_user(UserName="new-user")
    install, *typed = set_up("AWS")
    assert install.startswith("pip install ")
    said = [shell(command) for command in typed]
    (policy,) = iam.list_attached_user_policies(UserName="new-user")["AttachedPolicies"]
    version = iam.get_policy(PolicyArn=policy["PolicyArn"])["Policy"]["DefaultVersionId"]
    document = iam.get_policy_version(PolicyArn=policy["PolicyArn"], VersionId=version)["PolicyVersion"]
    assert document["Document"] == json.loads(SHIPPED.read_text())
    assert "us-east-2" in said[-1], "the prices of what can be had"


def test_the_role_of_heads_may_launch_and_use_its_bucket(lab: Lab, account: Any, shell: Any) -> None:
    iam: Any = boto3.client("iam", region_name="us-east-1", endpoint_url=lab.url)
    with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_policy(PolicyName="rlboost", PolicyDocument=SHIPPED.read_text())
    for command in ["aws configure", *role_of_heads()]:
        shell(command)
    (role,) = iam.get_instance_profile(InstanceProfileName="rlboost-head")["InstanceProfile"]["Roles"]
    (policy,) = iam.list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]
    assert policy["PolicyName"] == "rlboost"
    bucket = iam.get_role_policy(RoleName="rlboost-head", PolicyName="bucket")["PolicyDocument"]
    places = [statement["Resource"] for statement in bucket["Statement"]]
    assert places == ["arn:aws:s3:::MY-BUCKET/*", "arn:aws:s3:::MY-BUCKET"]
    iam.remove_role_from_instance_profile(InstanceProfileName="rlboost-head", RoleName="rlboost-head")
    iam.delete_instance_profile(InstanceProfileName="rlboost-head")
    iam.detach_role_policy(RoleName="rlboost-head", PolicyArn=policy["PolicyArn"])
    iam.delete_role_policy(RoleName="rlboost-head", PolicyName="bucket")
    iam.delete_role(RoleName="rlboost-head")


def test_the_role_of_workers_exists_and_has_no_rights(lab: Lab, account: Any, shell: Any) -> None:
    iam: Any = boto3.client("iam", region_name="us-east-1", endpoint_url=lab.url)
    for command in ["aws configure", *role_of_workers()]:
        shell(command)
    (role,) = iam.get_instance_profile(InstanceProfileName="rlboost-worker")["InstanceProfile"]["Roles"]
    assert role["RoleName"] == "rlboost-worker"
    assert iam.list_attached_role_policies(RoleName="rlboost-worker")["AttachedPolicies"] == []
    assert iam.list_role_policies(RoleName="rlboost-worker")["PolicyNames"] == []
    iam.remove_role_from_instance_profile(InstanceProfileName="rlboost-worker", RoleName="rlboost-worker")
    iam.delete_instance_profile(InstanceProfileName="rlboost-worker")
    iam.delete_role(RoleName="rlboost-worker")  # other tests of the lab count its roles
