"""One page about a run, for a browser: live from `rlboost dashboard`, frozen by `rlboost report`.

Enter at `data.run_data`, the figures of the page as one JSON object; `page` makes HTML of them, `server`
serves it, `summary` is the same in Markdown. The figures are those of `status --json` and `cost --json`:
nothing is computed a second time. Only `rlboost_cli.commands` imports this room.
"""
