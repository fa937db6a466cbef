"""Prompts on which drafters are compared: short ones of several kinds of text, or texts of the user. Text
only.

The built-in prompts were written for this purpose. The prompts of one task are as similar as those of one
application.
"""

from __future__ import annotations

import re

from ondevice.records import dataclass

MAX_PROMPTS = 8
"""Default for the most prompts of one task."""


@dataclass(frozen=True)
class Task:
    """Prompts of one kind. chat: True for user messages, False for texts to be continued as they stand."""

    name: str
    prompts: tuple[str, ...]
    chat: bool = False

    def at_most(self, count: int) -> Task:
        """The task with at most `count` of its prompts, spread evenly."""
        total = len(self.prompts)
        if total <= count:
            return self
        kept = tuple(self.prompts[index * total // count] for index in range(count))
        return Task(self.name, kept, self.chat)


def paragraphs(text: str) -> tuple[str, ...]:
    """The parts of a text that empty lines separate."""
    return tuple(part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())


BUILT_IN = (
    Task(
        "dialogue",
        (
            "Hi, can you find me a quiet restaurant in San Jose for dinner on Friday?",
            "I need a bus from Sacramento to Los Angeles on the 5th of March, for two people.",
            "What will the weather be like in Oakland tomorrow? I am planning a picnic.",
            "Please book a hotel room in Seattle for three nights, somewhere that takes dogs.",
        ),
        chat=True,
    ),
    Task(
        "sql",
        (
            "Which driver won at Monza in 1998? [driver, team, track, year, position]",
            "How many players are from Canada? [player, country, club, goals]",
            "What is the highest score of the home team when the away team is Carlton? "
            "[home team, home score, away team, away score, venue, date]",
            "Name the title of the episode that Jane Hill wrote. [episode, title, written by, viewers]",
        ),
        chat=True,
    ),
    Task(
        "meaning",
        (
            "name[The Old Mill], eatType[pub], food[Italian], priceRange[cheap], area[riverside]",
            "name[Green Lantern], eatType[coffee shop], customer rating[5 out of 5], near[Station Hotel]",
            "name[Harbour View], food[Japanese], priceRange[high], area[city centre], familyFriendly[yes]",
            "name[Two Sisters], eatType[restaurant], food[French], customer rating[low], area[riverside]",
        ),
        chat=True,
    ),
    Task(
        "maths",
        (
            "Tom has 3 boxes with 12 pencils each. He gives 8 pencils away. How many does he have left?",
            "A train goes 60 miles in an hour. How far does it go in 2 hours and 30 minutes?",
            "Anna earns $15 an hour and works 6 hours a day, 5 days a week. What does she earn in a week?",
            "A farm has twice as many hens as ducks, and 27 birds in all. How many are ducks?",
        ),
        chat=True,
    ),
    Task(
        "story",
        (
            "It was late in the evening when the carriage came to the gate, and the old man who opened it",
            "The captain looked at the sky for a long while before he spoke. “We shall have",
            "Once upon a time there lived, at the edge of a great forest, a woodcutter who",
            "“I never said that I would marry him,” said Margaret, and she turned to the window",
        ),
    ),
    Task(
        "code",
        (
            'def is_prime(n):\n    """Return True if n is a prime number."""\n',
            'def count_words(text):\n    """Return a dictionary from every word of text to its count."""\n',
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
            'def fibonacci(n):\n    """Return a list of the first n Fibonacci numbers."""\n',
        ),
    ),
)
