"""One answer: streamed, and stopped when the user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sagellm.engines.requests.outputs import RequestOutput
from sagellm.engines.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sagellm.engines import LLMEngine


def stream_answer(
    engine: LLMEngine,
    token_ids: list[int],
    params: SamplingParams,
    *,
    write: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> RequestOutput:
    """Generate an answer, write its text as it arrives, and return the complete or interrupted answer.

    Raises InvalidRequestError before running anything.
    """
    num_written = 0

    def write_new(output: RequestOutput) -> RequestOutput:
        nonlocal num_written
        text = output.outputs[0].text
        write(text[num_written:])
        num_written = len(text)
        return output

    request_id = engine.add_request(token_ids, params)
    output: RequestOutput | None = None
    while engine.has_unfinished_requests():
        if is_stopped():
            output = write_new(engine.abort_with_output(request_id))
            break
        for output in engine.step():
            write_new(output)
    assert output is not None, "a request ends with an output"
    return output
