"""Writes the pages of docs/ that follow from the code; `--check` fails where one is out of date."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

import rlboost_templates
from docs.recipes import recipes_page
from docs.sizing import sizing_page
from rlboost_cli.foreign.mapping import Framework, OptionRule, as_yaml
from rlboost_cli.foreign.reading import FRAMEWORKS
from rlboost_cli.main import COMMANDS, app
from rlboost_runtime.health import limits
from rlboost_runtime.health.glossary import GLOSSARY, Metric
from rlboost_runtime.health.rules import BACKUP, FLEET, FLEET_KINDS, STORM, STUCK, Kind, step_rules
from rlboost_runtime.job.file.load import FieldDoc, describe_fields
from rlboost_runtime.protocol.prometheus import PROM_METRICS

DOCS = Path(__file__).resolve().parent
INTRODUCTION = """\
A job is one YAML 1.2 file. It is checked strictly before anything starts: `rlboost check JOB` lists every
mistake as `file:line: field: what was found; what to do` and exits with 2. File names are relative to the
job file and must lie below its folder, because a run keeps copies of them; a model folder may be anywhere. In
YAML 1.2 `yes` is text (write `true`), `8.0` is no whole number, and quotes make text of a number.

Editors complete and check a job file with its JSON Schema: type `rlboost schema > job.schema.json` beside
it, and write `# yaml-language-server: $schema=job.schema.json` as its first line (VS Code with the YAML
extension, Neovim, and others with yaml-language-server). The schema knows fields, types and bounds; what
fields ask of one another, and whether files are there, only `rlboost check` knows."""
ABOUT = {
    "": "The whole file. Fields without a default must be given.",
    "model": "With `{init: tiny}` instead of a folder.",
    "data": "One of `source`, `dataset` and `reasoning_gym` with its fields, or a list of such sections"
    " ([Data and chat templates](data.md)).",
    "reward": "With `{http: URL}` instead of a function.",
    "reward[]": "Several rewards, each with a name and a weight ([Rewards and evaluation](rewards.md)).",
    "evaluation": "One evaluation, or a list of them. Its prompts come from `source`, `dataset` or"
    " `reasoning_gym`, each with its fields as in [`data`](#data); without, they are held out of the training"
    " data. It may have a `reward` of its own ([Rewards and evaluation](rewards.md)).",
    "rollout.spot.any_of[]": "A list of machines of these kinds, in any mixture.",
}
SAME_AS = {
    **dict.fromkeys(("data.reward", "evaluation.reward"), "reward"),
    **dict.fromkeys(("data.reward[]", "evaluation.reward[]"), "reward[]"),
}


def job_file_page() -> str:
    """Return docs/job-file.md."""
    fields = _without_repetition(describe_fields())
    sections = dict.fromkeys(_section(field) for field in fields)
    parts = [
        "# The job file",
        "<!-- Written by docs/generate.py from runtime/rlboost_runtime/job/: do not edit. -->",
        INTRODUCTION,
        "## An example",
        f"```yaml\n{rlboost_templates.text('laptop').rstrip()}\n```",
        "## Fields",
    ]
    for section in sections:
        parts += _section_parts(section, [field for field in fields if _section(field) == section])
    return "\n\n".join(parts) + "\n"


METRICS_INTRODUCTION = """\
The trainer adds a line of JSON per step to `metrics.jsonl` in the run's folder. `rlboost metrics RUN` shows
the important metrics with a chart of each, `rlboost metrics RUN NAME` any other; `--json` and `--csv` are for
programs.
Steps count from 0 in the file and from 1 in every command."""
IT_LEARNS = """\
1. `reward_mean` rises over tens of steps, and `eval_reward_mean` with it. A single step is noise.
2. `zero_variance_share` stays below a half: most groups have something to compare.
3. `truncated_share` is small, and `length_mean` does not run into the limit.
4. `entropy` falls slowly. `grad_norm` is steady. `mismatch_kl` is below 0.003.
5. `rlboost samples RUN` shows responses that deserve their reward."""
WARNINGS_INTRODUCTION = """\
A warning begins after several bad steps in a row and ends after as many by a milder limit, so it neither
flickers nor repeats. `rlboost status` (key `warnings` with `--json`), the live view and the end of `launch`
show the warnings in force; the beginning and the end of each are events of the run. A warning never ends a
run."""

COMMANDS_INTRODUCTION = """\
Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity, 5 budget
reached, 6 credentials or quota, 7 cloud unreachable, 8 rented GPUs cannot be used, 130 interrupted before
there was a run.

`rlboost --install-completion` installs completion of commands, runs and instances for your shell. Colour
follows `NO_COLOR` and whether the output is a terminal. [JSON output](json.md) lists the keys of `--json`.
[Environment variables](variables.md) lists what else has an effect."""
TRACKERS = """\
With `tracking: {tensorboard: true}` the same curves are in the run's folder:
`tensorboard --logdir ~/.rlboost/runs` shows all runs. `tracking: {wandb: {project: NAME}}` sends them to
Weights & Biases. Both number steps from 0, as `metrics.jsonl` does; screens count from 1. They come with
`pip install 'rlboost[track]'`."""
TRACES = """\
With `tracking: {otlp: "http://HOST:4318"}` the trainer sends a trace per step to a collector, by OTLP over
HTTP. Its root, `step`, has the step's metrics as attributes; below it are `train`, `publish`, `checkpoint`,
and a `wait` for each stretch of time that none of them covers: for responses, rewards or the GPUs. An
attribute of its resource names the run. A collector that is away holds nothing up; what it misses is lost."""
PROMETHEUS_INTRODUCTION = """\
The coordinator answers `/metrics` on its port, over TLS and with the run's token, like everything there. The
figures are those of `rlboost status --json`. This goes into `scrape_configs` of a Prometheus on the head;
HOME is your home folder, and PORT, which stays the same through restarts, ends the `url` in the run's
`endpoint.json`:

```yaml
- job_name: rlboost
  scheme: https
  static_configs: [{targets: ["127.0.0.1:PORT"]}]
  authorization: {credentials_file: HOME/.rlboost/runs/RUN/secrets/token}
  tls_config: {ca_file: HOME/.rlboost/runs/RUN/secrets/cert.pem}
```

[grafana-dashboard.json](grafana-dashboard.json) is a dashboard on these metrics: import it in Grafana under
Dashboards > New > Import. Each metric has the label `run`. Cost and generated tokens are gauges, because the
books may correct the one and a lost machine takes the last of the other."""


def metrics_page() -> str:
    """Return docs/metrics.md."""
    sections = dict.fromkeys(metric.section for metric in GLOSSARY.values())
    parts = [
        "# Metrics and warnings",
        "<!-- Written by docs/generate.py from runtime/rlboost_runtime/health/: do not edit. -->",
        METRICS_INTRODUCTION,
        "## How to see that it learns",
        IT_LEARNS,
        "## Warnings",
        WARNINGS_INTRODUCTION,
        _warnings_table(),
        "## Metrics",
    ]
    for section in sections:
        rows = [_metric_row(metric) for metric in GLOSSARY.values() if metric.section == section]
        head = ["| metric | unit | meaning | healthy | otherwise |", "|---|---|---|---|---|"]
        parts += [f"### {section}", "\n".join([*head, *rows])]
    parts += ["## Prometheus", PROMETHEUS_INTRODUCTION, _prometheus_table()]
    parts += ["## TensorBoard and Weights & Biases", TRACKERS, "## OpenTelemetry", TRACES]
    return "\n\n".join(parts) + "\n"


def _prometheus_table() -> str:
    rows = [
        f"| `{each.full_name}` | {each.type} | {', '.join(each.labels)} | {each.help} |"
        for each in PROM_METRICS
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def _warnings_table() -> str:
    kinds = [*(rule.kind for rule in step_rules()), *FLEET_KINDS]
    head = ["| warning | begins | ends | why | what to do |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_warning_row(kind) for kind in kinds)])


def _warning_row(kind: Kind) -> str:
    begins, ends = ("<=", ">") if kind.is_low_bad else (">=", "<")
    first = f"{kind.steps} step{'s' * (kind.steps > 1)}"
    last = f"{kind.steps_to_end} steps"
    if kind is FLEET:
        first, last = f"{limits.FLEET_LONG_S / 60:.0f} min", f"{limits.FLEET_RECOVERED_S:.0f} s"
    elif kind in (STORM, STUCK, BACKUP):
        since = f"losses of {limits.STORM_S / 60:.0f} min" if kind is STORM else "one look"
        first, last = since, since
    return (
        f"| `{kind.code}` | {kind.quantity} {begins} {kind.begins:g} for {first}"
        f" | {ends} {kind.ends:g} for {last} | {_cell(kind.reason)} | {_cell(kind.advice)} |"
    )


def _metric_row(metric: Metric) -> str:
    return (
        f"| `{metric.name}` | {metric.unit} | {_cell(metric.meaning)} | {_cell(metric.healthy)} |"
        f" {_cell(metric.advice)} |"
    )


COMING_FROM = """\
`rlboost init --from FILE` writes a job file from a configuration of veRL, TRL, prime-rl or OpenRLHF. Each
line names the option that it comes from; a default of theirs that is not ours gets a line, too. What the job
file does not express, or not exactly, is printed, and listed in its last lines, each option with the reason.
Machines and budget are those of a template.

```sh
rlboost init job.yaml --from run_qwen3_8b.sh
rlboost init job.yaml --from grpo.yaml --devices 8 --template own-machines
rlboost init job.yaml --from rl.toml
rlboost init job.yaml --from train_ppo.sh
rlboost check job.yaml
```

- **veRL**: YAML, or a shell script or text with a.b=value. A script is read, not run: its variables,
  arrays, sums and `case` are followed, and variables of your environment count as they would for it
  (`DEVICE=gpu rlboost init ...`). What only a run would tell is listed. The whole configuration as YAML is
  printed by `python3 -m verl.trainer.main_ppo ... --cfg job`.
- **TRL**: the arguments of its GRPO trainer as YAML or JSON. How many GPUs trained, they do not say:
  `--devices`. TRL's own trainer can also train, and the fleet generate ([own-trainer.md](own-trainer.md)).
- **prime-rl**: the TOML file of a run.
- **OpenRLHF**: a shell script that runs its `train_ppo_ray`, read as veRL's are. Options have the
  names of the present version (`--actor.adam.lr`); those of versions up to 0.9 (`--actor_learning_rate`)
  are known, too. `rlboost init --template reinforce-pp-8b` writes its REINFORCE++, `--template ppo-8b` its
  PPO. Its SFT, rejection sampling and online DPO are in [stages](stages.md).

What differs even where all options agree:

- With several mini-batches per step, the groups that finish first form the first update; veRL's are drawn
  from the whole step.
- `weight_decay` is for matrices, not for norms and biases.
- KL estimates are not clamped; veRL clamps its low_var_kl to +-10.

Paths of data files are those of copies beside the job file. Rewards are Python and stay yours:
`reward: math` stands in for them, and [own_reward](../examples/own_reward/job.yaml) shows one. In the
tables, an option without a default has none, and * stands for any text."""


def coming_from_page() -> str:
    """Return docs/coming-from.md."""
    parts = [
        "# Coming from veRL, TRL, prime-rl or OpenRLHF",
        "<!-- Written by docs/generate.py from rlboost_cli/foreign/: do not edit. -->",
        COMING_FROM,
    ]
    for framework in FRAMEWORKS:
        rows = [_rule_row(rule, framework) for rule in framework.rules]
        others = [f"| `{option}` | {_cell(reason)} |" for option, reason in framework.elsewhere.items()]
        parts += [
            f"## {framework.name}",
            "\n".join(["| field | options (their defaults) | how |", "|---|---|---|", *rows]),
            "Without a field of their own:",
            "\n".join(["| option | what there is instead |", "|---|---|", *others]),
        ]
    return "\n\n".join(parts) + "\n"


def _rule_row(rule: OptionRule, framework: Framework) -> str:
    options = [f"`{option}`{_their_default(framework, option)}" for option in rule.options]
    return f"| `{rule.field}` | {', '.join(options)} | {_cell(rule.note or rule.unset)} |"


def _their_default(framework: Framework, option: str) -> str:
    default = framework.defaults[option]
    return "" if default is None else f" ({as_yaml(default)})"


RUN_FOLDER_INTRODUCTION = """\
Everything about a run is in one folder: `~/.rlboost/runs/NAME`, or below `RLBOOST_HOME`. Every file may be
read at any time; none may be changed while the run is open. A file is replaced whole, or grows by lines.
`rlboost rm NAME` deletes the folder of an ended run. Where the head is another machine, the run's folder is
there, and the one here has what was last seen of it.

| you look for | it is in |
|---|---|
| the trained model, in the Hugging Face format | `checkpoints/model` |
| a checkpoint to [resume or fork](resuming.md) from | `checkpoints/step-000012`: NAME@13 in commands |
| curves, responses, evaluations | `metrics.jsonl`, `samples.jsonl`, `evaluations.jsonl`; steps count from 0 |
| the bill | `ledger.sqlite`, by `rlboost cost NAME --csv` |
| why a run failed | `outcome.json`, then `logs` |
| the job with every default | `job.json` |
| a client's key and certificate for the [endpoint](endpoint.md) | `secrets/api_keys`, `secrets/cert.pem` |

Keep `secrets` to yourself; prompts and responses are in several other files
([security](security.md) says who can read what). With an `output` in the job, checkpoints, model and
report are there, too, and never the secrets.

A file that was found damaged is kept under its name with `.damaged` after it; it may be deleted."""


def run_files() -> list[tuple[str, str, str]]:
    """Return name, content and writer of what a run keeps, as the module of the folder says it."""
    module = Path(__file__).resolve().parents[1] / "runtime/rlboost_runtime/run/folder.py"
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    lines = [line for line in text.partition("::\n")[2].splitlines() if line.startswith("    ")]
    found: list[tuple[str, str, str]] = []
    for line in lines:
        words, _, writer = line.strip().rpartition("  ")
        if line.startswith(" " * 8):  # the last entry continues, and ends with its writer
            name, content, _ = found.pop()
            found.append((name, f"{content} {(words or writer).strip()}", writer if words else ""))
        else:
            name, _, content = line.strip().partition(" ")
            content, _, writer = content.strip().rpartition("  ")
            found.append((name, (content or writer).strip(), writer if content else ""))
    return found


def run_folder_page() -> str:
    """Return docs/run-folder.md."""
    rows = [f"| `{name}` | {_cell(content)} | {writer} |" for name, content, writer in run_files()]
    return (
        "\n\n".join(
            [
                "# The folder of a run",
                "<!-- Written by docs/generate.py from runtime/rlboost_runtime/run/: do not edit. -->",
                RUN_FOLDER_INTRODUCTION,
                "## All files",
                "\n".join(["| name | content | written by |", "|---|---|---|", *rows]),
            ]
        )
        + "\n"
    )


def losses_page() -> str:
    """Return docs/losses.md: what the module of the losses says of them."""
    module = Path(__file__).resolve().parents[1] / "runtime/rlboost_runtime/trainer/learn/losses.py"
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    formulas = text[text.index("Losses (the objective") : text.index("Shape suffixes")].rstrip()
    return f"""\
# Losses

<!-- Written by docs/generate.py from runtime/rlboost_runtime/trainer/learn/losses.py: do not edit. -->

What `algorithm.loss` names. [The objective](objective.md) has what goes beside it: KL, entropy and learning
rate. Tests compare value and gradient with TRL's.

{formulas}
"""


def commands_page() -> str:
    """Return docs/commands.md."""
    parts = [
        "# Commands",
        "<!-- Written by docs/generate.py from rlboost_cli/commands/: do not edit. -->",
        COMMANDS_INTRODUCTION,
        "\n".join(f"- [`{name}`](#{name}): {sentence}" for name, sentence in COMMANDS.items()),
    ]
    group: Any = get_command(app)  # typer's own click
    for name in COMMANDS:
        parts += _command_parts(name, group.commands[name])
    return "\n\n".join(parts) + "\n"


def _command_parts(name: str, command: Any) -> Iterator[str]:
    sentence, _, examples = str(command.help).partition("\n\n")
    yield f"## `{name}`"
    yield f"{sentence}."
    lines = [line.partition(": ")[2] for line in examples.splitlines() if line.startswith("Example: ")]
    if lines:
        yield "```sh\n" + "\n".join(lines) + "\n```"
    rows = [row for each in command.params if (row := _row(each)) is not None]
    if rows:
        yield "\n".join(["| | | default |", "|---|---|---|", *rows])


def _row(parameter: Any) -> str | None:
    if parameter.name == "help":
        return None
    is_option = parameter.opts[0].startswith("-")
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    shown = names if is_option else parameter.metavar or parameter.name.upper()
    if is_option and not parameter.is_flag:
        shown += f" {parameter.metavar or 'VALUE'}"
    default = parameter.default
    is_plain = not (default is None or default is False or callable(default) or default in ([], ()))
    value = f"`{getattr(default, 'value', default)}`" if is_plain and default is not True else ""
    words = str(parameter.help or "").replace("|", "\\|")
    return f"| `{shown}` | {words} | {value} |"


PAGES = {
    "job-file.md": job_file_page,
    "metrics.md": metrics_page,
    "coming-from.md": coming_from_page,
    "losses.md": losses_page,
    "recipes.md": recipes_page,
    "run-folder.md": run_folder_page,
    "sizing.md": sizing_page,
    "commands.md": commands_page,
}


def outdated() -> list[str]:
    """Return the names of the pages that differ from what would be written."""
    return [
        name
        for name, page in PAGES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    """Write all pages, or with `--check` say which are out of date; return the exit code."""
    if arguments == ["--check"]:
        stale = outdated()
        for name in stale:
            print(f"docs/{name} is out of date; run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")
    return 0


def _without_repetition(fields: list[FieldDoc]) -> list[FieldDoc]:
    """Leave out of `evaluation` what is as in `data`, and what its forms have in common but once."""
    known = {(field.path.partition(".")[2], field.doc) for field in fields if _section(field) == "data"}
    kept: list[FieldDoc] = []
    for field in fields:
        key = field.path.partition(".")[2], field.doc
        if _section(field) != "evaluation" or key not in known:
            kept.append(field)
            known |= {key} if _section(field) == "evaluation" else set()
    return kept


def _section(field: FieldDoc) -> str:
    return field.path.rpartition(".")[0]


def _section_parts(section: str, fields: list[FieldDoc]) -> list[str]:
    heading = f"### `{section}`" if section else "### Top level"
    if section in SAME_AS:
        return [heading, f"The fields of [`{SAME_AS[section]}`](#{SAME_AS[section].rstrip('[]')})."]
    parts = [heading, ABOUT[section]] if section in ABOUT else [heading]
    once = list(dict.fromkeys(field._replace(form="") for field in fields))
    if len({field.path for field in once}) == len(once):  # its forms describe what they share alike
        return [*parts, _table(once)]
    for form in dict.fromkeys(field.form for field in fields):
        parts += [form, _table([field for field in fields if field.form == form])]
    return parts


def _table(fields: list[FieldDoc]) -> str:
    rows = [
        f"| `{field.path.rpartition('.')[2]}` | {field.type} | {_code(field.default)} | {_cell(field.doc)} |"
        for field in fields
    ]
    return "\n".join(["| field | value | default | meaning |", "|---|---|---|---|", *rows])


def _code(default: str) -> str:
    return default if default in {"", "required", "on", "off"} else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
