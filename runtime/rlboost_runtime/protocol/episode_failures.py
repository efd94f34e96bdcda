"""Why an episode was left out: kinds and words.

The trainer decides and counts (`trainer.episodes.outcome` has the rule). Pure; standard library only.
"""

from __future__ import annotations

from enum import StrEnum


class EpisodeFailure(StrEnum):
    """Why an episode has no reward."""

    RAISED = "raised"
    """The environment raised, or its program ended with an error."""
    TIMEOUT = "timeout"
    """It took longer than environment.timeout_s."""
    DIED = "died"
    """Its process ended."""
    MEMORY = "memory"
    """It needs more memory than `reward_memory_mib` allows."""
    UNREACHABLE = "unreachable"
    """The environment's server cannot be reached, or its machine vanished in mid-episode."""
    NO_NUMBER = "no_number"
    """Its reward is no finite number."""
    LOST = "lost"
    """A response or the endpoint was lost: not the environment's doing."""


WORDS = {
    EpisodeFailure.RAISED: "raised an error",
    EpisodeFailure.TIMEOUT: "took too long",
    EpisodeFailure.DIED: "ended its process",
    EpisodeFailure.MEMORY: "ran out of memory",
    EpisodeFailure.UNREACHABLE: "could not be reached",
    EpisodeFailure.NO_NUMBER: "gave a reward that is no number",
    EpisodeFailure.LOST: "lost its responses",
}
"""What the environment did, in words."""
