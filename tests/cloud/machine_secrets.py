"""Every credential in reach of whoever has a machine of the lab: files, processes, metadata, role."""

from __future__ import annotations

from cloudlab import catalogue
from cloudlab.client import Lab

_FIND = """
cd /
for secret in '{token}' '{key}' 'PRIVATE KEY'; do
  grep -rlsI --exclude-dir={{skypilot-runtime,venv,.python,sky-user-env,archive-v0}} -e "$secret" \\
    home tmp var/tmp run root etc |
    while read -r file; do echo "$secret|$(stat -c '%a %U' "$file")|/$file"; done
done
for file in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do
  tr '\\0' '\\n' 2> /dev/null < $file | grep -vF 'for secret in' |
    grep -qE -e '[{token_head}]{token_rest}|[{key_head}]{key_rest}' && echo "a process|$file"
done
curl -s -m 3 http://169.254.169.254/latest/meta-data/iam/security-credentials/ && echo "metadata|answers"
exit 0
"""


def check_credentials(lab: Lab, id: str, credential: str, run_token: str) -> None:
    """List every credential on machine `id` and compare it with what has to be there.

    The host key is the machine's own, and so is the `credential` of its agents, readable by their user alone.
    The run has no token there. Of the account there is nothing: no key, no role that may do anything,
    no way to other machines.
    """
    for key in (catalogue.SECRET_KEY, run_token):
        script = _FIND.format(
            token=credential,
            key=key,
            token_head=credential[0],
            token_rest=credential[1:],
            key_head=key[0],
            key_rest=key[1:],
        )
        found = sorted(line for line in lab.ask("shell", id=id, script=script).splitlines() if "|" in line)
        assert found == sorted(
            [
                "PRIVATE KEY|600 root|/etc/ssh/ssh_host_ed25519_key",
                f"{credential}|600 ubuntu|/home/ubuntu/.rlboost/machine/bootstrap.json",
            ]
        )
    (record,) = [m for m in lab.machines() if m["id"] == id]
    assert record["role"] == catalogue.ROLE, "the user's own, which may do nothing; not SkyPilot's"
    assert lab.ask("roles") == {catalogue.ROLE: []}
