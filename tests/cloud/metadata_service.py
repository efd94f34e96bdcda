"""What EC2's metadata service says on a machine of the lab that has a role: keys for it, by IMDSv2 only.

The lab itself has none: a test that is about a role starts this on the machine. moto takes any keys.
"""

from __future__ import annotations

from cloudlab import catalogue
from cloudlab.client import Lab

_SERVICE = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BASE = "/latest/meta-data/iam/security-credentials/"
KEYS = {{
    "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
    "Expiration": "2099-01-01T00:00:00Z", "AccessKeyId": "of-the-role",
    "SecretAccessKey": "secret-of-the-role", "Token": "session-of-the-role",
}}

class Handler(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.say(200 if self.path == "/latest/api/token" else 404, "the-session")

    def do_GET(self):
        pages = {{BASE: "{role}", BASE + "{role}": json.dumps(KEYS)}}
        if self.headers.get("X-aws-ec2-metadata-token") != "the-session":
            self.say(401, "")
        else:
            self.say(200 if self.path in pages else 404, pages.get(self.path, ""))

    def say(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
        self.end_headers()
        self.wfile.write(text.encode())

ThreadingHTTPServer(("169.254.169.254", 80), Handler).serve_forever()
"""
_START = """
ip addr add 169.254.169.254/32 dev lo
cat > /run/metadata.py <<'END'
{service}
END
setsid --fork python3 /run/metadata.py > /run/metadata.log 2>&1 < /dev/null
"""


def start_metadata_service(lab: Lab, machine: str) -> None:
    """Start it on a machine that has booted; it ends with the machine."""
    lab.ask("shell", id=machine, script=_START.format(service=_SERVICE.format(role=catalogue.ROLE)))
