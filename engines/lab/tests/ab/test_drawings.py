"""What plots of a comparison show."""

from __future__ import annotations

import re

import numpy as np

from sagellm.lab.ab.drawings import over_time


def test_the_axis_of_differences_is_that_of_requests_that_differ():
    differences = np.zeros(1000)
    differences[::200] = 400.0
    drawn = over_time(np.arange(1000.0), differences, "tokens saved", 1)
    ticks = [float(each.replace(",", "")) for each in re.findall(r'class="tick end"[^>]*>([\d.,]+)<', drawn)]
    assert max(ticks) == 400
