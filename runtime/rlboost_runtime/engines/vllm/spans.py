"""Which policy version each token of a response was sampled under. Pure.

vLLM says it with the last chunk only, as spans over the whole response; until then tokens are labelled by the
version that was in place when they came. The two must agree: a response whose tokens went out under another
label than the engine's is not passed on as finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def label_tokens(
    labels: Sequence[int], num_new: int, label: int, spans: Sequence[tuple[str, int, int]]
) -> tuple[list[tuple[int, int]], str]:
    """Return (version, count) runs for `num_new` tokens after those labelled already, and a problem or "".

    `label`: the version in place now. `spans`: (version, start, end) in tokens of the response, half-open;
    empty where the engine has not said it. Tokens that no span covers get `label`.
    """
    said = dict(_said(spans))
    wrong = [k for k, ours in enumerate(labels) if said.get(k, ours) != ours]
    if wrong:
        first = wrong[0]
        problem = f"token {first} was labelled version {labels[first]}, the engine says {said[first]}"
        return [(label, num_new)] if num_new else [], problem
    versions = [said.get(len(labels) + k, label) for k in range(num_new)]
    return [(version, len(list(run))) for version, run in groupby(versions)], ""


def _said(spans: Sequence[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """(token, version) for every token of spans whose version is a number, as ours are."""
    numbered = [(int(name), start, end) for name, start, end in spans if name.isdecimal()]
    return [(k, version) for version, start, end in numbered for k in range(start, end)]
