"""An environment of several turns: find a number from 1 to 9; after a wrong guess there is a hint."""

from __future__ import annotations


class Guess:
    """One game. A guess may be wrong four times."""

    def reset(self, number: int) -> None:
        """Begin. `number` is a field of the row; the prompt is the row's, as nothing is returned."""
        self.number = number
        self.num_guesses = 0
        self.found = False

    def step(self, response: str) -> str | None:
        """Take a response; return what the model reads next, None at the end."""
        self.num_guesses += 1
        guess = response.strip()
        self.found = guess == str(self.number)
        if self.found or self.num_guesses == 5:
            return None
        if not (guess.isdecimal() and len(guess) == 1):
            return " a digit? "
        low = 3 * ((self.number - 1) // 3) + 1
        return f" {low} to {low + 2}? "

    def get_reward(self) -> float:
        """Return 1 for the first guess, a fifth less for each further one, 0 for none."""
        return (6 - self.num_guesses) / 5 if self.found else 0.0


def is_digit(response: str) -> float:
    """Score a single response: how the tiny model's warm-up knows when it has seen enough digits."""
    guess = response.strip()
    return float(guess.isdecimal() and len(guess) == 1)
