"""Settings of the algorithm that make no sense together; what is merely a default never counts."""

import pytest

from rlboost_runtime.job import Algorithm
from rlboost_runtime.job.file.load import check_sense
from rlboost_runtime.trainer.learn.learner import loss_config


@pytest.mark.parametrize(
    ("algorithm", "field", "problem"),
    [
        (
            {"loss": "cispo", "dual_clip": 3.0},
            "dual_clip",
            "found 3.0, but cispo has no dual clip; remove it",
        ),
        ({"loss": "gspo", "dual_clip": 2.0}, "dual_clip", "found 2.0, but gspo has no dual clip; remove it"),
        (
            {"importance_sampling": "none", "importance_cap": 2.0},
            "importance_cap",
            "found 2.0, but importance_sampling is none; remove one of them",
        ),
        (
            {"importance_floor": 0.5},
            "importance_floor",
            "found 0.5, but only icepop has a floor; remove it, or write importance_sampling: icepop",
        ),
        (
            {"importance_sampling": "icepop", "importance_floor": 0.9, "importance_cap": 0.8},
            "importance_floor",
            "found 0.9, which is not below importance_cap 0.8; lower it",
        ),
        (
            {"old_logprobs": "recompute"},
            "old_logprobs",
            "found recompute, but with minibatches_per_step 1 the training pass itself gives them; remove it",
        ),
        (
            {"zero_variance_groups": "replace", "prompts_per_step": 16},
            "zero_variance_groups",
            "found replace, but there are no spare_prompts to take; write spare_prompts: 4, max_refills: 2,"
            " or drop",
        ),
        (
            {"spare_prompts": 3},
            "spare_prompts",
            "found 3, but they are used only with zero_variance_groups: replace; write that, or remove them",
        ),
    ],
)
def test_contradictions_are_told(algorithm, field, problem):
    assert [tuple(each)[:2] for each in check_sense({"algorithm": algorithm})] == [
        (("algorithm", field), problem)
    ]


@pytest.mark.parametrize(
    "algorithm",
    [
        None, [], {}, {"loss": "cispo"}, {"loss": "gspo", "dual_clip": None}, {"dual_clip": 3.0},
        {"importance_sampling": "icepop", "importance_floor": 0.5},
        {"zero_variance_groups": "replace", "spare_prompts": 2}, {"zero_variance_groups": "drop"},
        {"zero_variance_groups": "replace", "max_refills": 2},
        {"old_logprobs": "recompute", "minibatches_per_step": 4}, {"spare_prompts": "3"},
        {"importance_sampling": "icepop", "importance_floor": "x"},
    ],
)  # fmt: skip
def test_what_makes_sense_or_is_somebody_else_s_mistake_passes(algorithm):
    assert check_sense({"algorithm": algorithm}) == []


def test_defaults_of_each_loss():
    def config(**changes):
        found = loss_config(Algorithm(**changes))
        return found.clip_low, found.clip_high, found.importance, found.importance_cap

    assert config() == (0.2, 0.28, "token", 2.0)
    assert config(loss="grpo") == (0.2, 0.2, "token", 2.0)
    assert config(loss="gspo")[:2] == (3e-4, 4e-4)
    assert config(loss="cispo")[:2] == (1.0, 4.0)
    assert config(loss="cispo", clip_low=0.5, clip_high=1.0)[:2] == (0.5, 1.0)
    assert config(importance_sampling="none")[3] is None
    assert config(importance_sampling="icepop")[2:] == ("icepop", 5.0)
    assert config(importance_sampling="sequence_mask")[2:] == ("sequence_mask", 3.0)
    assert config(importance_cap=4.0)[3] == 4.0


def test_old_logprobs_are_recomputed_only_where_the_algorithm_needs_them():
    assert not Algorithm(loss="gspo").recomputes_old_logprobs
    assert Algorithm(loss="gspo", minibatches_per_step=2).recomputes_old_logprobs
    assert not Algorithm(loss="gspo", minibatches_per_step=2, old_logprobs="engine").recomputes_old_logprobs
    assert not Algorithm(minibatches_per_step=2).recomputes_old_logprobs
    assert Algorithm(minibatches_per_step=2, old_logprobs="recompute").recomputes_old_logprobs
