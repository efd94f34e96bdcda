"""Every metric that the trainer writes is in the glossary, and the glossary has no other."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from rlboost_runtime.health.glossary import (
    GLOSSARY,
    IMPORTANT,
    described,
    evaluation_metric,
    is_important,
    similar,
)
from rlboost_runtime.protocol.reward_failures import SCORED_METRIC, RewardFailure, metric_of
from rlboost_runtime.trainer import loop
from rlboost_runtime.trainer.data import feed
from rlboost_runtime.trainer.episodes.outcome import episode_metrics
from rlboost_runtime.trainer.learn import companions, learner
from rlboost_runtime.trainer.learn.learner import StepSums
from rlboost_runtime.trainer.learn.sample import GroupSelection
from rlboost_runtime.trainer.rollout import evaluation, metrics

COMPUTED = {"tokens_per_s"}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def keys_in(source: str, function: str) -> set[str]:
    """Literal keys of dictionaries, and of items that are set, in a function."""
    tree = ast.parse(source)
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    keys: set[str] = set()
    for node in ast.walk(found):
        if isinstance(node, ast.Dict):
            keys |= {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys |= {
                n.value for n in [node.slice] if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    return keys


def written() -> set[str]:
    of_loop, of_groups = inspect.getsource(loop), inspect.getsource(metrics)
    return {
        *keys_in(of_loop, "_step"),
        *keys_in(of_loop, "_finish"),
        *keys_in(of_groups, "group_metrics"),
        *keys_in(of_groups, "choice_metrics"),
        *keys_in(of_groups, "newer_tokens"),
        *keys_in(of_groups, "early_metrics"),
        *keys_in(inspect.getsource(feed), "metrics"),
        *keys_in(inspect.getsource(learner), "_pair_metrics"),
        *keys_in(inspect.getsource(companions), "judged"),
        *keys_in(inspect.getsource(companions.Critic), "metrics"),
        *keys_in(inspect.getsource(evaluation), "_metrics"),
        *("eval_updates", "eval_avg_at_K", "eval_pass_at_K", "reward_NAME_mean"),
        *episode_metrics([]),
        *StepSums().metrics(),
        *StepSums(staleness=1).metrics(),
        *StepSums(choices=1).metrics(),
        *GroupSelection("keep", 1).metrics(),
        SCORED_METRIC,
        *(metric_of(kind) for kind in RewardFailure),
    }


def test_the_glossary_has_what_is_written_and_nothing_else() -> None:
    assert written() - GLOSSARY.keys() == set()
    assert GLOSSARY.keys() - written() == COMPUTED


def test_every_entry_is_a_sentence_and_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for metric in GLOSSARY.values():
        assert metric.meaning.endswith((".", ")")), metric.name
        assert f"| `{metric.name}` |" in page
    assert set(IMPORTANT) <= GLOSSARY.keys()


def test_metrics_of_a_named_evaluation_are_described_as_those_of_one_without_a_name() -> None:
    found = described("eval_aime-24_pass_at_16")
    assert (found.name, found.meaning) == ("eval_aime-24_pass_at_16", GLOSSARY["eval_pass_at_K"].meaning)
    assert evaluation_metric("eval_reward_mean") == ("", "reward_mean")
    assert evaluation_metric("eval_my_set_avg_at_4") == ("my_set", "avg_at_4")
    assert evaluation_metric("eval_updates") is None
    assert described("reward_format_mean").meaning == GLOSSARY["reward_NAME_mean"].meaning
    assert [is_important(name) for name in ("reward_format_mean", "reward_std")] == [True, False]
    assert [is_important(name) for name in ("eval_a_avg_at_4", "eval_a_length_mean")] == [True, False]


def test_a_name_of_somebody_elses_trainer_is_described_too() -> None:
    assert described("my_metric").meaning
    assert similar("reward_men", ["reward_mean"])[0] == "reward_mean"
    assert "reward_mean" in similar("reward", [])
