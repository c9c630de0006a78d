from __future__ import annotations

import random
from statistics import median

from sagellm.kvmgr.lifetime.statistical import Window


def test_a_window_agrees_with_a_plain_list() -> None:
    rng = random.Random(0)
    window, model = Window(50), []
    for _ in range(2000):
        value = rng.randrange(40)
        window.add(value)
        model = [*model, value][-50:]
        low, high = rng.randrange(-5, 45), rng.randrange(-5, 45)
        beyond = [x for x in model if x > low]
        assert len(window) == len(model)
        assert window.count_above(low) == len(beyond)
        if beyond:
            assert window.median_above(low) == median(beyond)
        if low <= high:
            assert window.count_between(low, high) == sum(low <= x <= high for x in model)


def test_the_oldest_number_is_forgotten_first() -> None:
    window = Window(3)
    for value in (9, 1, 5, 7):
        window.add(value)
    assert window.median_above(-1) == 5
    assert window.count_above(7) == 0
