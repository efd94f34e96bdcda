"""How the tiny model's warm-up knows when it has seen enough digits."""


def is_digit(response: str) -> float:
    """Return 1 for a digit."""
    guess = response.strip()
    return float(guess.isdecimal() and len(guess) == 1)
