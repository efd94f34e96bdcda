"""TextArena's GuessTheNumber behind a server of OpenEnv: `python server.py PORT`.

It knows nothing of RLBoost. It needs openenv and textarena, in a Python environment of their own.
"""

import random
import re
import sys
from typing import Any

import textarena
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

GAME = "GuessTheNumber-v0"
TURNS = 5


class Move(Action):
    """What the player says."""

    text: str


class Seen(Observation):
    """What the game answers."""

    text: str


class Game(Environment):
    """One game: numbers 1 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Seen:
        """Begin the game of a seed."""
        random.seed(seed)
        self.game = textarena.make(GAME, min_number=1, max_number=9, max_turns=TURNS)
        self.game.reset(num_players=1, seed=seed)
        self.num_steps = 0
        return Seen(text="")

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        """Play one move; at the end the game says the reward."""
        self.num_steps += 1
        is_over, _ = self.game.step(f"[{action.text.strip()}]")
        if is_over:
            rewards, _ = self.game.close()
            return Seen(text="", done=True, reward=float(rewards[0]))
        _, heard = self.game.get_observation()
        hints = re.findall(r"target number is (higher|lower)", str(heard))
        return Seen(text=f" {hints[-1]}? " if hints else " a number? ")

    @property
    def state(self) -> State:
        """How far the game is."""
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_app(Game, Move, Seen, env_name="guess", max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
