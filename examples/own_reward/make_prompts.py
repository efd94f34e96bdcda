"""Writes `prompts.jsonl`: parcels between cities, and the label that each should get.

    python make_prompts.py

The same seed gives the same file. A line has the prompt that the model reads, and fields that only the reward
function sees (and the warm-up of the tiny model, which imitates `answer`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

CITIES = [
    "Amsterdam", "Athens", "Bergen", "Berlin", "Bogota", "Boston", "Cairo", "Chennai", "Dakar", "Denver",
    "Dublin", "Florence", "Geneva", "Glasgow", "Hanoi", "Havana", "Istanbul", "Jakarta", "Kyoto", "Lagos",
    "Lima", "Lisbon", "London", "Madrid", "Manila", "Nairobi", "Naples", "Osaka", "Oslo", "Paris",
    "Porto", "Quito", "Riga", "Rome", "Santiago", "Seoul", "Sydney", "Tallinn", "Tokyo", "Turin",
    "Utrecht", "Valencia", "Vienna", "Warsaw", "Yangon", "Zagreb", "Zurich",
]  # fmt: skip
NUM_LINES = 600


def main() -> None:
    """Write the file beside this one."""
    choose = random.Random(0)  # noqa: S311 - not for secrets
    lines: dict[str, str] = {}  # by prompt: each once
    while len(lines) < NUM_LINES:
        origin, destination = choose.sample(CITIES, 2)
        kilograms = choose.randint(10, 99)
        label = f"{origin[0]}{destination[0]}{kilograms}"
        prompt = f"Parcel from {origin} to {destination}, {kilograms} kg. Label:\n"
        line = {"prompt": prompt, "answer": label, "origin": origin, "destination": destination}
        lines[prompt] = json.dumps(line)
    Path(__file__).with_name("prompts.jsonl").write_text("\n".join(lines.values()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
