"""Thresholds of the health warnings. Each has a limit to begin, a milder one to end, and its reason.

Shares are fractions of 1. "In a row" means in consecutive trained steps.
"""

from __future__ import annotations

STEPS_IN_A_ROW = 3
"""Steps beyond a limit before a warning begins, and within the milder one before it ends. One step is noise:
its prompts are a small sample. Three steps are few enough to save the money of the others."""

FLAT_REWARD = 0.01
"""Largest distance of the mean reward from 0 or 1 that counts as flat. At 1 % right answers, a group of 8 has
a chance of 8 % to contain one: at most one group in twelve teaches anything."""
FLAT_REWARD_ENDS = 0.02
FLAT_REWARD_STD_FACTOR = 10.0
"""A standard deviation counts as a tenth of itself. So rewards of +1 and -1 with mean 0 are not flat, while
rewards of 0 and 1 with 1 % ones (deviation 0.0995) are."""

ZERO_VARIANCE = 0.8
"""Share of groups whose rewards are all equal. They have advantage 0 and no gradient, so at this share the
step's effective batch is at most a fifth of what was paid for. DAPO (arXiv 2503.14476, section 3.2)
resamples such groups for this reason."""
ZERO_VARIANCE_ENDS = 0.7

TRUNCATED = 0.3
"""Share of responses cut at the length limit. A cut response has no answer, so its reward is about its
length; with more than a few tenths of them, this noise dominates (arXiv 2503.14476, section 3.4)."""
TRUNCATED_ENDS = 0.2

MISMATCH_KL = 0.01
"""Nats per token between engine and trainer. Rounding in bfloat16 gives some 0.001; ten times as much points
to another cause. A rule of thumb: no bound is known from which on training fails."""
MISMATCH_KL_ENDS = 0.005
LAG_KL = 0.1
"""Nats per token between the policy that sampled and the one that a step begins with, a few updates later.
A tenth of a nat is some ten times what updates of usual size move the policy by; most tokens are then
clipped. A rule of thumb."""
LAG_KL_ENDS = 0.05
MISMATCH_ABS = 8.0
"""Largest difference of one token's log-probability. Rare tokens differ by 1 to 3 nats in bfloat16; 8 nats
(a factor of 3,000) in each of several steps come from other weights or another sampler. A rule of thumb."""
MISMATCH_ABS_ENDS = 6.0

ENTROPY_RATIO = 0.1
"""Entropy relative to the first steps. Gains in reward come with falling entropy and stop where none is left
(arXiv 2505.22617): at a tenth, responses of a group are nearly equal."""
ENTROPY_RATIO_ENDS = 0.15
ENTROPY_FIRST_STEPS = 5
"""Steps whose mean is the reference."""
ENTROPY_LEAST = 0.01
"""Nats per token. A policy that begins below this is deterministic from the start: a ratio means nothing."""

NOT_FINITE_ENDS_AFTER = 5
"""Steps without a gradient that is not finite before that warning ends; a single one begins it, because
a mini-batch was dropped."""

GRAD_NORM_FACTOR = 10.0
"""Gradient norm relative to the median of the steps before. Single spikes are clipped and harmless; a norm
that stays at ten times the usual one is the start of a divergence."""
GRAD_NORM_FACTOR_ENDS = 5.0
GRAD_NORM_WINDOW = 50
"""Steps whose median is the usual norm; steps beyond the milder limit are left out."""
GRAD_NORM_LEAST = 1.0
"""Smaller norms are never reported: the default grad_clip leaves them as they are, and a run that finds its
first rewards goes from nearly no gradient to a usual one."""
GRAD_NORM_FIRST_STEPS = 5
"""Steps before there is a usual norm."""

IDLE_RESERVED = 0.5
"""Share of a step in which the trainer held the reserved GPUs and waited for responses. They are the dearest
machines of a run: beyond one half they cost more waiting than working."""
IDLE_RESERVED_ENDS = 0.4

FLEET_SHARE = 0.5
"""Connected spot instances relative to the useful number. Preemptions cost a few at a time; at half, the
rollout takes up to twice as long as planned."""
FLEET_SHARE_ENDS = 0.75
FLEET_LONG_S = 900.0
"""Seconds below `FLEET_SHARE` before the warning begins. A boot takes minutes, and a machine that has
not connected after 600 s is replaced: a shorter time would report what repairs itself."""
FLEET_RECOVERED_S = 60.0
"""Seconds at `FLEET_SHARE_ENDS` or more before it ends."""

SAVING = 0.0
"""Saving over machines on demand alone, as a fraction of their cost. Below 0, spot costs more."""
SAVING_ENDS = 0.02
SAVING_FROM_STEP = 10
"""Trained steps before the comparison is judged: until then, boots and start-up dominate the bill."""

STORM_SHARE = 0.5
"""Spot instances lost within `STORM_S`, relative to these and those that are connected. Single preemptions
are usual and cost a boot each; at half of the fleet the run waits for machines."""
STORM_SHARE_ENDS = 0.25
STORM_LEAST = 3
"""Fewer losses within `STORM_S` are no storm, however small the fleet."""
STORM_S = 600.0
"""Seconds over which losses are counted: about a boot and the wait for it."""

STUCK_S = 1800.0
"""Seconds without a new token or a trained step while the run is open. Machines that are replaced and a
restarted coordinator take minutes; after half an hour somebody has to look."""
STUCK_FACTOR = 3.0
"""A run whose longest step took more than a third of `STUCK_S` gets this many of such steps instead: training
alone produces no token."""

BACKUP_LAG_S = 60.0
"""Age of the copy of the head at `output`, in seconds, before the warning begins: a loss of the head's disk
would cost so much. It is 5 to 10 s old where copying works: a minute is several rounds that failed or are too
slow."""
BACKUP_LAG_ENDS_S = 30.0
