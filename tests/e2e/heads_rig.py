"""A bucket on loopback, and a head that is lost as a machine is: everything of it at once, with its disk."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlboost_runtime.processes import kill_tagged
from tests.e2e.e2e_rig import Cli

BUCKET = "heads"


@contextmanager
def bucket_for(cli: Cli) -> Iterator[str]:
    """Yield the `output` of a job: an S3 bucket of a server of ours, for which the commands have keys."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    cli.environment |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")):
        pass
    try:
        yield f"s3://{BUCKET}/out"
    finally:
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")):
            server.stop()


def lose_head(cli: Cli, name: str) -> dict[str, Any]:
    """SIGKILL every process of the run, spot machines included, and delete its folder; return what its books
    said last."""
    books: dict[str, Any] = cli.json("cost", name)
    folder: Path = cli.run_folder(name).path
    kill_tagged(folder)
    cli.assert_gone(name)
    shutil.rmtree(folder)
    return books
