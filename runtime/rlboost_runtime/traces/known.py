"""Public spot traces by name: where they are from, under which licence, and what is in them.

None of them is shipped. `fetch` brings one from its origin; length and digest are those of the recorded
commit, so that what was fetched is what is described here. Statistics are those of `trace_statistics` on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces.generate import PROFILES


@dataclass(frozen=True, slots=True)
class KnownTrace:
    """A public trace. Capacity in nodes."""

    name: str
    what: str
    repository: str
    commit: str
    path: str
    licence: str
    size_bytes: int
    sha256: str
    hours: float
    mean_capacity: float
    max_capacity: int
    removes: int
    zone: str = ""

    @property
    def url(self) -> str:
        """Where the file is."""
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def source(self) -> str:
        """Its origin in words."""
        return f"recorded, {self.repository}@{self.commit[:7]} {self.path}, licence {self.licence}"


_BAMBOO = ("uclasystem/bamboo", "80809293289419d40a870b4a9ccb8df0082ce3fb")
_SKYPILOT = ("skypilot-org/spot-traces", "221da1ab9bdfe7966da296265d7694d52dc0c5a6")
_16_NODES, _4_NODES = "availability/16-node/aws-08-27-2023", "preemption/4-node/aws-08-03-2023"
_NO_LICENCE = "none stated"
_MIT = "MIT"


def _v100(zone: str) -> str:
    return f"{zone}_v100_1.json"


# fmt: off
KNOWN: dict[str, KnownTrace] = {trace.name: trace for trace in (
    KnownTrace("bamboo-p3", "AWS p3 nodes; the trace behind the RLBoost paper", *_BAMBOO,
               "traces/p3-trace.csv", _MIT, 7_617,
               "0b7828fcd4637799590578287415d4d4bbb5e3cfef5fbaf23ca8e5b3ef6bdd68", 11.37, 24.03, 32, 167),
    KnownTrace("bamboo-g4dn", "AWS g4dn nodes", *_BAMBOO,
               "traces/g4dn-trace.csv", _MIT, 3_335,
               "6a21d2003cfa16acfb65fb87b5521dd995c72f49a37900979eea177e853592eb", 10.63, 12.76, 24, 74),
    KnownTrace("gcp-a100", "GCP A100 nodes, December 2021", *_BAMBOO,
               "traces/gcloud/a100x1-east1b.txt", _MIT, 6_700,
               "cbd874201d07901a0bd3df1c4b5981b3193b51d45620b34802b28dca4f0e01b5", 27.02, 57.30, 64, 154,
               "us-east1-b"),
    KnownTrace("skypilot-16-us-east-2b", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-east-2b')}", _NO_LICENCE, 11_519,
               "fa1f117fd25696aa36250d73f4a47954a281c04243cadbe47074b9ae4a70659f", 270.58, 8.76, 16, 910,
               "us-east-2b"),
    KnownTrace("skypilot-16-us-west-2a", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-west-2a')}", _NO_LICENCE, 16_281,
               "0aae822d720585aa435b6a04248d2bd21ec1cdaab112e6cbfb23b12f5f664078", 394.67, 6.90, 16, 1473,
               "us-west-2a"),
    KnownTrace("skypilot-16-us-west-2c", "capacity for up to 16 AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_16_NODES}/{_v100('us-west-2c')}", _NO_LICENCE, 16_258,
               "0a540de491d1e1764c1e913ecef04e0475717acb328cf1a8d601948cac138c83", 394.67, 6.83, 16, 1366,
               "us-west-2c"),
    KnownTrace("skypilot-4-us-east-1f", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-east-1f')}", _NO_LICENCE, 11_036,
               "bfd67f8b3bfb267f3145e22ff1c52a036e0151ad2c3826f08d7668c54fd60dbe", 305.33, 1.38, 4, 195,
               "us-east-1f"),
    KnownTrace("skypilot-4-us-east-2a", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-east-2a')}", _NO_LICENCE, 15_437,
               "ce9eb00a1c6f49a77c5258e12363a5acc10a2180a793e99c10457fe47d0d7f47", 427.58, 2.92, 4, 75,
               "us-east-2a"),
    KnownTrace("skypilot-4-us-west-2c", "four held AWS V100 nodes, 2023", *_SKYPILOT,
               f"{_4_NODES}/{_v100('us-west-2c')}", _NO_LICENCE, 15_437,
               "19548cb2e5ec120fb5e12a11203e0a22ee9d9387993cfbe909d8fea4e04fa400", 427.58, 3.26, 4, 330,
               "us-west-2c"),
)}
# fmt: on


def known(name: str) -> KnownTrace:
    """Return the public trace `name`. Raises `ConfigError`."""
    if name in PROFILES:
        raise ConfigError(
            f"`{name}` is generated: there is nothing to fetch", f"rlboost traces show {name} makes it"
        )
    if name not in KNOWN:
        raise ConfigError(f"no public trace is called `{name}`", f"choose one of {', '.join(KNOWN)}")
    return KNOWN[name]
