"""Whether a run learns and pays: what each metric means, limits, and warnings. Enter at `monitor`.

`glossary` names every metric of `metrics.jsonl`; `limits` holds each threshold with its reason; `rules` are
the warnings on a step's metrics; `monitor` feeds them and adds those on the fleet. Pure, without effects: the
coordinator feeds it, and the command line shows the result.
"""
