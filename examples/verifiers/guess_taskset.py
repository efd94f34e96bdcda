"""A taskset of verifiers 0.4: find a number from 1 to 9; after a wrong guess there is a hint.

It knows nothing of RLBoost: any package that exports a `Taskset` is used in the same way.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]

MAX_GUESSES = 5


class GuessData(vf.TaskData):
    """One game; `answer` is the number."""

    answer: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """What a game is worth."""

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 for the first guess, a fifth less for each further one, 0 for none."""
        guesses = [(message.content or "").strip() for message in trace.assistant_messages]
        return 1 - guesses.index(self.data.answer) / MAX_GUESSES if self.data.answer in guesses else 0.0


class GuessEnv(vf.SingleAgentEnv):
    """The one who knows the number."""

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        """Play one game."""
        number = int(task.data.answer)
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(MAX_GUESSES - 1):
                guess = (segment.last_reply or "").strip()
                if segment.terminated or guess == task.data.answer:
                    break
                low = 3 * ((number - 1) // 3) + 1
                is_digit = guess.isdecimal() and len(guess) == 1
                segment = await interaction.turn(f" {low} to {low + 2}? " if is_digit else " a digit? ")


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Endless games."""

    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        """Yield the games."""
        number = 0
        while True:
            number = number % 9 + 1
            yield GuessTask(GuessData(prompt="1 to 9? ", answer=str(number)), self.config.task)
