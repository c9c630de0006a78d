"""How to do everyday things, step by step, and what fills a day."""

from __future__ import annotations

import re

from corpus.tables.read import read_table

STEPS = {name: tuple(re.findall(r"[A-Z][^.]+[.]", steps)) for name, steps in read_table("steps")[""]}

MORNING = (
    "Get up and stretch",
    "Take a shower",
    "Eat breakfast",
    "Feed the cat",
    "Water the plants",
    "Go for a run",
)
FORENOON = (
    "Answer the mail",
    "Clean the kitchen",
    "Go to the market",
    "Work on the report",
    "Read a book",
    "Do the laundry",
)
NOON = ("Eat lunch with a friend", "Make a salad", "Cook some soup", "Have a sandwich in the park")
AFTERNOON = (
    "Take a walk",
    "Visit the library",
    "Practice the piano",
    "Call a friend",
    "Study for the test",
    "Ride the bike",
)
EVENING = ("Cook dinner", "Watch a movie", "Play a board game", "Write in the diary", "Listen to music")
NIGHT = ("Plan the next day", "Read for a while and go to bed", "Brush your teeth and go to sleep")
DAY = ((7, MORNING), (9, FORENOON), (12, NOON), (14, AFTERNOON), (18, EVENING), (22, NIGHT))
